"""Run by test_old_clients.py with the librdkafka of confluent-kafka 1.7.0, which this Python can not import itself.

Writes ten messages, reads them in a group from the beginning, commits, and prints what it read and committed.
"""

import ctypes
import sys
import time
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p

CONSUMER, COPY, UNASSIGNED = 1, 2, -1
MESSAGES = 10


class Message(Structure):
    _fields_ = [
        ("err", c_int), ("rkt", c_void_p), ("partition", c_int32), ("payload", c_void_p), ("len", c_size_t),
        ("key", c_void_p), ("key_len", c_size_t), ("offset", c_int64), ("private", c_void_p),
    ]  # fmt: skip


class Place(Structure):
    _fields_ = [
        ("topic", c_char_p), ("partition", c_int32), ("offset", c_int64), ("metadata", c_void_p),
        ("metadata_size", c_size_t), ("opaque", c_void_p), ("err", c_int), ("private", c_void_p),
    ]  # fmt: skip


class Places(Structure):
    _fields_ = [("cnt", c_int), ("size", c_int), ("elems", POINTER(Place))]


path, address, topic, group = sys.argv[1:]
rd = ctypes.CDLL(path)
rd.rd_kafka_version_str.restype = c_char_p
for name in ("conf_new", "new", "topic_new"):
    getattr(rd, f"rd_kafka_{name}").restype = c_void_p
rd.rd_kafka_topic_partition_list_new.restype = POINTER(Places)
rd.rd_kafka_consumer_poll.restype = POINTER(Message)


def client(kind: int, **settings: str) -> c_void_p:
    said = ctypes.create_string_buffer(512)
    conf = c_void_p(rd.rd_kafka_conf_new())
    for name, value in {"bootstrap.servers": address, **settings}.items():
        setting = name.replace("_", ".").encode(), value.encode()
        assert rd.rd_kafka_conf_set(conf, *setting, said, c_size_t(512)) == 0, said.value
    made = rd.rd_kafka_new(kind, conf, said, c_size_t(512))
    assert made, said.value
    return c_void_p(made)


producer = client(0, enable_idempotence="true", compression_codec="lz4")
target = c_void_p(rd.rd_kafka_topic_new(producer, topic.encode(), None))
for number in range(MESSAGES):
    body = b"%d" % number
    assert rd.rd_kafka_produce(target, UNASSIGNED, COPY, body, c_size_t(len(body)), None, c_size_t(0), None) == 0
assert rd.rd_kafka_flush(producer, 60_000) == 0

consumer = client(CONSUMER, group_id=group, auto_offset_reset="earliest", enable_auto_commit="false")
rd.rd_kafka_poll_set_consumer(consumer)
wanted = rd.rd_kafka_topic_partition_list_new(1)
rd.rd_kafka_topic_partition_list_add(wanted, topic.encode(), UNASSIGNED)
assert rd.rd_kafka_subscribe(consumer, wanted) == 0
seen: list[str] = []
until = time.monotonic() + 60
while len(seen) < MESSAGES and time.monotonic() < until:
    message = rd.rd_kafka_consumer_poll(consumer, 500)
    if message:
        if message.contents.err == 0:
            seen.append(ctypes.string_at(message.contents.payload, message.contents.len).decode())
        rd.rd_kafka_message_destroy(message)
committed = rd.rd_kafka_commit(consumer, None, 0)
places = rd.rd_kafka_topic_partition_list_new(1)
rd.rd_kafka_topic_partition_list_add(places, topic.encode(), 0)
asked = rd.rd_kafka_committed(consumer, places, 60_000)
low, high = c_int64(), c_int64()
looked = rd.rd_kafka_query_watermark_offsets(consumer, topic.encode(), 0, byref(low), byref(high), 60_000)
rd.rd_kafka_consumer_close(consumer)
print(rd.rd_kafka_version_str().decode(), ",".join(seen), places.contents.elems[0].offset, low.value, high.value)
sys.exit(committed or asked or looked)
