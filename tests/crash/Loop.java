import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;

/** Reads, writes and commits in transactions. After an error that it cannot abort, it starts again with new clients. */
public class Loop {
    static final String STRINGS = "org.apache.kafka.common.serialization.String";

    static Properties settings(String address, String... more) {
        Properties made = new Properties();
        made.put("bootstrap.servers", address);
        made.put("reconnect.backoff.max.ms", "100");
        made.put("retry.backoff.max.ms", "100");
        for (int at = 0; at < more.length; at += 2) made.put(more[at], more[at + 1]);
        return made;
    }

    static void work(KafkaConsumer<String, String> consumer, KafkaProducer<String, String> producer) {
        producer.initTransactions();
        consumer.subscribe(List.of("in"));
        while (true) {
            ConsumerRecords<String, String> records = consumer.poll(Duration.ofMillis(200));
            if (records.isEmpty()) continue;
            producer.beginTransaction();
            try {
                for (ConsumerRecord<String, String> one : records)
                    producer.send(new ProducerRecord<>("out", one.partition(), null, one.value() + "!"));
                Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
                for (TopicPartition one : records.partitions())
                    offsets.put(one, new OffsetAndMetadata(consumer.position(one)));
                producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
                producer.commitTransaction();
            } catch (KafkaException error) {
                producer.abortTransaction();
                throw error; // restart, and read again from the group's committed offset
            }
        }
    }

    public static void main(String[] arguments) throws Exception {
        while (true) {
            try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings(arguments[0],
                        "transactional.id", "loop", "transaction.timeout.ms", "10000",
                        "key.serializer", STRINGS + "Serializer", "value.serializer", STRINGS + "Serializer"));
                    KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings(arguments[0],
                        "group.id", "loop", "auto.offset.reset", "earliest", "enable.auto.commit", "false",
                        "session.timeout.ms", "6000", "isolation.level", "read_committed", "max.poll.records", "20",
                        "key.deserializer", STRINGS + "Deserializer", "value.deserializer", STRINGS + "Deserializer"))) {
                work(consumer, producer);
            } catch (KafkaException error) {
                Thread.sleep(50);
            }
        }
    }
}
