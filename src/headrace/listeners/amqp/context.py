"""The state that all connections of one AMQP listener share."""

from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.broker import Broker
from headrace.broker.metrics.counters import ListenerStats
from headrace.config import Config
from headrace.listeners.amqp.consumer_timeouts import ConsumerTimeouts
from headrace.listeners.amqp.direct_reply import DirectReplies


class ListenerContext:
    """Created by the listener, passed to each of its connections and channels."""

    def __init__(self, broker: Broker, config: Config, stats: ListenerStats) -> None:
        self.broker = broker
        self.config = config
        self.stats = stats
        self.clock = broker.clock
        self.users = broker.users
        self.protected_mode = ProtectedMode(broker.users, is_enabled=config.protected_mode)
        self.flushes = broker.vhosts.flushes
        self.replies = DirectReplies()
        self.timeouts = ConsumerTimeouts()
        self.consumers_count = 0
