"""Config: the settings as the broker uses them, typed, frozen and with their defaults."""

from typing import Literal
from urllib.parse import urlencode

import msgspec

from headrace.config.units import Address
from headrace.log.settings import KB, MB, LogSettings, StreamSettings

Durability = Literal["sync", "os"]
Profile = Literal["none", "throughput", "latency", "availability"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
MigrationPolicy = Literal["bidirectional", "upgrade", "downgrade", "disabled"]
AmqpProduct = Literal["headrace", "rabbitmq"]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one broker. Built by `load` and passed down; there is no global instance."""

    data_dir: str = "./headrace-data"
    http: Address | None = Address("localhost", 15672)
    amqp: Address | None = Address("localhost", 5672)
    kafka: Address | None = Address("localhost", 9092)
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    tls_listeners: tuple[str, ...] = ("amqp", "kafka", "http")
    protected_mode: bool = True
    durability: Durability = "sync"
    standby_confirms: int = 0
    profile: Profile = "none"
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    auto_create_topics: bool = True
    auto_create_partitions: int = 1
    partitions_max: int = 10_000
    request_bytes_max: int = 64 * MB
    decompressed_bytes_max: int = 128 * MB
    read_bytes_max: int = 16 * MB
    read_wait_ms_max: int = 60_000
    connections_max: int = 20_000
    stop_timeout_ms: int = 10_000
    memory_limit: int = 0
    disk_free_limit: int = 256 * MB
    retention_interval_ms: int = 30_000
    kafka_advertised: Address | None = None
    kafka_node_id: int = 1
    kafka_session_timeout_ms_max: int = 30 * 60 * 1000
    kafka_migration_policy: MigrationPolicy = "bidirectional"
    amqp_product: AmqpProduct = "headrace"
    amqp_heartbeat_ms: int = 60_000
    amqp_channels_max: int = 2047
    amqp_frame_max: int = 128 * KB
    amqp_bindings_max: int = 1_000_000
    amqp_consumers_max: int = 100_000
    log: LogSettings = LogSettings()
    stream: StreamSettings = StreamSettings()
    origins: dict[str, str] = msgspec.field(default_factory=dict)  # by setting name; only settings that were given

    def has_tls(self, listener: str) -> bool:
        """Whether the listener accepts only TLS; otherwise it accepts only plain connections."""
        return self.tls_cert is not None and listener in self.tls_listeners

    def http_url(self, authority: str) -> str:
        """URL of the HTTP listener for clients on this machine.

        With TLS, the URL pins the configured certificate, so that the host name in the certificate does not matter.
        """
        if self.tls_cert is None or not self.has_tls("http"):
            return f"http://{authority}"
        return f"https://{authority}?{urlencode({'pinnedcertfile': self.tls_cert})}"
