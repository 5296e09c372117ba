import java.time.Duration;
import java.util.*;
import org.apache.kafka.common.serialization.*;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.*;
import org.apache.kafka.streams.kstream.*;
import org.apache.kafka.streams.state.*;

/** Kafka Streams' first example, exactly once: every count it ever had of a word, in all and by windows of ten seconds. */
public class WordCount {
    public static void main(String[] given) {
        String name = given[1];
        Properties settings = new Properties();
        settings.put("bootstrap.servers", given[0]);
        settings.put("application.id", name);
        settings.put("state.dir", given[2]);
        settings.put("processing.guarantee", "exactly_once_v2");
        settings.put("num.stream.threads", 2);
        settings.put("statestore.cache.max.bytes", 0);  // every count goes out, not only the last one before a commit
        settings.put("consumer.session.timeout.ms", 6000);
        settings.put("consumer.heartbeat.interval.ms", 500);
        settings.put("default.key.serde", Serdes.StringSerde.class);
        settings.put("default.value.serde", Serdes.StringSerde.class);
        for (int i = 3; i < given.length; i += 2) settings.put(given[i], given[i + 1]);

        StreamsBuilder builder = new StreamsBuilder();
        KGroupedStream<String, String> words = builder.<String, String>stream(name + "-lines")
            .flatMapValues(line -> Arrays.asList(line.split(" ")))
            .groupBy((key, word) -> word, Grouped.as("word"));
        words.count(Materialized.<String, Long, KeyValueStore<Bytes, byte[]>>as("all"))
            .toStream().mapValues(count -> count.toString()).to(name + "-all");
        words.windowedBy(TimeWindows.ofSizeAndGrace(Duration.ofSeconds(10), Duration.ofHours(1)))
            .count(Materialized.<String, Long, WindowStore<Bytes, byte[]>>as("windows"))
            .toStream().map((word, count) -> KeyValue.pair(word.key() + "@" + word.window().start(), count.toString()))
            .to(name + "-windows");

        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.setUncaughtExceptionHandler(error -> {
            System.out.println("failed: " + error.getCause());
            return org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        Runtime.getRuntime().addShutdownHook(new Thread(() -> streams.close(Duration.ofSeconds(60))));
        streams.start();
    }
}
