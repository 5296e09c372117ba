import java.util.*;
import java.util.concurrent.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.*;

/** What every client since 0.11 can do, in words of that time: topics and configs, three kinds of producers, a group. */
public class OldClient {
    static Properties with(String address, String... more) {
        Properties found = new Properties();
        found.put("bootstrap.servers", address);
        for (int i = 0; i < more.length; i += 2) found.put(more[i], more[i + 1]);
        return found;
    }

    static KafkaProducer<String, String> producer(String address, String... more) {
        return new KafkaProducer<>(with(address, more), new StringSerializer(), new StringSerializer());
    }

    @SuppressWarnings("deprecation")
    static long committed(String address, String group, TopicPartition place) {
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(with(address, "group.id", group),
                new StringDeserializer(), new StringDeserializer())) {
            return consumer.committed(place).offset();
        }
    }

    @SuppressWarnings("deprecation")
    static List<String> read(String address, String topic, String group, int count) {
        List<String> seen = new ArrayList<>();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(with(address, "group.id", group,
                "auto.offset.reset", "earliest", "enable.auto.commit", "false", "isolation.level", "read_committed",
                "session.timeout.ms", "30000"),
                new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(Collections.singletonList(topic));
            long until = System.currentTimeMillis() + 60_000;
            while (seen.size() < count && System.currentTimeMillis() < until) {
                for (ConsumerRecord<String, String> record : consumer.poll(200)) seen.add(record.value());
                consumer.commitSync();
            }
            TopicPartition first = new TopicPartition(topic, 0);
            long all = 0;
            for (PartitionInfo part : consumer.partitionsFor(topic)) {
                OffsetAndMetadata at = consumer.committed(new TopicPartition(topic, part.partition()));
                all += at == null ? 0 : at.offset();
            }
            System.out.println("committed " + all);
            System.out.println("begins " + consumer.beginningOffsets(Collections.singletonList(first)).get(first));
            System.out.println("at " + consumer.offsetsForTimes(Collections.singletonMap(first, 0L)).get(first).offset());
        }
        return seen;
    }

    public static void main(String[] arguments) throws Exception {
        String address = arguments[0], topic = arguments[1], group = arguments[2];
        boolean configs = !arguments[3].equals("0.11.0.3");
        try (AdminClient admin = AdminClient.create(with(address))) {
            NewTopic wanted = new NewTopic(topic, 2, (short) 1);
            wanted.configs(Collections.singletonMap("retention.ms", "100000"));
            admin.createTopics(Collections.singletonList(wanted)).all().get();
            TopicDescription described = admin.describeTopics(Collections.singletonList(topic)).all().get().get(topic);
            System.out.println("partitions " + described.partitions().size());
            ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
            Config changed = new Config(Collections.singletonList(new ConfigEntry("retention.ms", "200000")));
            admin.alterConfigs(Collections.singletonMap(resource, changed)).all().get();
            if (configs) {
                Config config = admin.describeConfigs(Collections.singletonList(resource)).all().get().get(resource);
                System.out.println("retention " + config.get("retention.ms").value());
            }
            System.out.println("nodes " + admin.describeCluster().nodes().get().size());
            System.out.println("listed " + admin.listTopics().names().get().contains(topic));
        }
        try (KafkaProducer<String, String> plain = producer(address, "acks", "1", "compression.type", "lz4")) {
            for (int i = 0; i < 10; i++) plain.send(new ProducerRecord<>(topic, 0, "k", "plain " + i)).get();
        }
        try (KafkaProducer<String, String> sure = producer(address, "enable.idempotence", "true")) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int i = 0; i < 10; i++) sent.add(sure.send(new ProducerRecord<>(topic, 0, "k", "sure " + i)));
            for (Future<RecordMetadata> one : sent) one.get();
        }
        try (KafkaProducer<String, String> bound = producer(address, "transactional.id", group + "-x")) {
            bound.initTransactions();
            for (String word : new String[] {"kept", "lost", "kept too"}) {
                bound.beginTransaction();
                bound.send(new ProducerRecord<>(topic, 1, "k", word)).get();
                if (word.equals("lost")) bound.abortTransaction();
                else {
                    Map<TopicPartition, OffsetAndMetadata> offsets =
                        Collections.singletonMap(new TopicPartition(topic, 0), new OffsetAndMetadata(7));
                    bound.sendOffsetsToTransaction(offsets, group + "-y");
                    bound.commitTransaction();
                }
            }
        }
        System.out.println("bound " + committed(address, group + "-y", new TopicPartition(topic, 0)));
        for (String value : read(address, topic, group, 22)) System.out.println("read " + value);
        try (AdminClient admin = AdminClient.create(with(address))) {
            admin.deleteTopics(Collections.singletonList(topic)).all().get();
            System.out.println("left " + admin.listTopics().names().get().contains(topic));
        }
    }
}
