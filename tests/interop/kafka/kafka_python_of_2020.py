"""Run by test_old_clients.py with kafka-python 2.0.2: what a script of that time does. Prints what it saw as JSON."""

import json
import sys

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, NewPartitions, NewTopic

address, topic, group = sys.argv[1:]
saw: dict[str, object] = {}
settings = {"bootstrap_servers": address, "api_version_auto_timeout_ms": 60_000}  # it gives up after 2 s
admin = KafkaAdminClient(**settings)
admin.create_topics([NewTopic(topic, 2, 1, topic_configs={"retention.ms": "100000"})])
admin.create_partitions({topic: NewPartitions(3)})
saw["partitions"] = len(admin.describe_topics([topic])[0]["partitions"])
admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"retention.ms": "200000"})])
[configs] = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
saw["retention"] = {entry[0]: entry[1] for entry in configs.resources[0][4]}["retention.ms"]

producer = KafkaProducer(**settings, acks="all", compression_type="gzip")
sent = [producer.send(topic, b"%d" % number, headers=[("h", b"v")], partition=number % 3) for number in range(30)]
saw["offsets"] = [one.get(60).offset for one in sent]
producer.close()

reader = KafkaConsumer(
    topic, **settings, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False,
    consumer_timeout_ms=60_000, session_timeout_ms=30_000,
)  # fmt: skip
messages = [next(reader) for _ in range(30)]
saw["values"] = sorted(int(message.value) for message in messages)
saw["headers"] = sorted({(name, value.decode()) for message in messages for name, value in message.headers})
reader.commit()
places = [TopicPartition(topic, number) for number in range(3)]
saw["committed"] = [reader.committed(place) for place in places]
saw["ends"] = list(reader.end_offsets(places).values())
saw["by_time"] = [found.offset for found in reader.offsets_for_times(dict.fromkeys(places, 0)).values()]
saw["state"] = admin.describe_consumer_groups([group])[0].state
reader.close()
saw["stored"] = sum(found.offset for found in admin.list_consumer_group_offsets(group).values())
admin.delete_topics([topic])
saw["left"] = topic in admin.list_topics()
print(json.dumps(saw))
