import java.util.Properties;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;

/** A producer whose transaction takes longer than it may: it aborts, and does the work again. */
public class LateProducer {
    public static void main(String[] arguments) throws Exception {
        String topic = arguments[1];
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        settings.put("transactional.id", arguments[2]);
        settings.put("transaction.timeout.ms", "5000");  // the second must be in time, however busy the machine is
        settings.put("key.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        settings.put("value.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings)) {
            producer.initTransactions();
            producer.beginTransaction();
            try {
                for (int number = 0; ; number++) {
                    producer.send(new ProducerRecord<>(topic, "late " + number)).get();
                    Thread.sleep(100);
                }
            } catch (ExecutionException | KafkaException late) {
                // The client raises the error before it records that it needs a new epoch. An immediate abort on a busy
                // machine would continue with the old epoch and be fenced.
                Thread.sleep(1000);
                producer.abortTransaction();
            }
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, "in time")).get();
            producer.commitTransaction();
        }
        System.out.println("committed");
    }
}
