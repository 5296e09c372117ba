import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.DescribeConfigsOptions;
import org.apache.kafka.common.config.ConfigResource;

/** The names of a resource's settings that come with a text, one a line: asked for with it, and without. */
public class SettingsExplained {
    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        ConfigResource resource = new ConfigResource(ConfigResource.Type.valueOf(arguments[1]), arguments[2]);
        try (Admin admin = Admin.create(settings)) {
            for (boolean wanted : new boolean[] {true, false}) {
                DescribeConfigsOptions options = new DescribeConfigsOptions().includeDocumentation(wanted);
                for (ConfigEntry entry : admin.describeConfigs(List.of(resource), options).all().get().get(resource).entries()) {
                    boolean explained = entry.documentation() != null && !entry.documentation().isEmpty();
                    System.out.println(wanted + " " + entry.name() + " " + explained);
                }
            }
        }
    }
}
