"""Authorization of a connection's user in its vhost, with RabbitMQ's checks and error texts.

A revoked permission takes effect with the next method: cached results are valid for one version of the users only.
Publishing is not checked per message: the scanner caches the target of a routing key until routes or users change (see
publish.target and Dispatcher.topology_version).
"""

import logging
from collections.abc import Callable
from typing import Any

from headrace.broker.access.permissions import DEFAULT_EXCHANGE, Rights
from headrace.broker.access.users import Users
from headrace.broker.routing.exchanges import Exchange, Topic
from headrace.broker.vhosts.settings import CONNECTIONS, limit_of
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import AccessRefused
from headrace.listeners.amqp.errors import ChannelError
from headrace.wire.amqp.protocol import NOT_ALLOWED

logger = logging.getLogger("headrace.amqp")

QUEUE, EXCHANGE = "queue", "exchange"
CACHED_MAX = 1000


class Access:
    def __init__(self, users: Users, user: str, vhost: str, peer: Any) -> None:
        self._users = users
        self._user, self._vhost, self._peer = user, vhost, peer
        self._publishes: dict[str, bool] = {}
        self._publishes_at = -1

    def rights(self) -> Rights | None:
        return self._users.rights(self._user, self._vhost)

    def configure(self, kind: str, name: str) -> None:
        rights = self.rights()
        if rights is None or not rights.may_configure(name):
            self._refuse(kind, name, "configure")

    def write(self, kind: str, name: str) -> None:
        rights = self.rights()
        if rights is None or not rights.may_write(name):
            self._refuse(kind, name, "write")

    def read(self, kind: str, name: str) -> None:
        rights = self.rights()
        if rights is None or not rights.may_read(name):
            self._refuse(kind, name, "read")

    def look_at(self, kind: str, name: str) -> None:
        """For passive declarations: any permission is enough, as in RabbitMQ 4. Older versions required none."""
        rights = self.rights()
        if rights is None or not (rights.may_read(name) or rights.may_write(name) or rights.may_configure(name)):
            self._refuse(kind, name, "configure")

    def publish(self, exchange: str) -> bool:
        """Raises unless the user may publish to the exchange. True if topic permissions limit the routing keys, see
        write_topic. Cached, for clients that use a new routing key for each message."""
        if self._publishes_at != self._users.version:
            self._publishes_at = self._users.version
            self._publishes.clear()
        found = self._publishes.get(exchange)
        if found is None:
            self.write(EXCHANGE, exchange)
            rights = self.rights()
            found = rights is None or rights.has_topic_rule(exchange)
            if len(self._publishes) < CACHED_MAX:
                self._publishes[exchange] = found
        return found

    def write_topic(self, exchange: Exchange, key: str) -> None:
        """Checks the topic permission for one routing key of a message."""
        if not isinstance(exchange, Topic):
            return
        rights = self.rights()
        if rights is None or not rights.may_write_topic(exchange.name, key):
            self._refuse_topic(exchange, key, "write")

    def bind(self, kind: str, destination: str, source: str, exchange: Exchange | None, key: str) -> None:
        """For bind and unbind, which need write permission on the destination and read permission on the source."""
        self.write(kind, destination)
        if (kind == EXCHANGE and not destination) or not source:
            raise AccessRefused("operation not permitted on the default exchange")
        self.read(EXCHANGE, source)
        if isinstance(exchange, Topic):
            rights = self.rights()
            if rights is None or not rights.may_read_topic(exchange.name, key):
                self._refuse_topic(exchange, key, "read")

    def check_limit(self, what: str, count: Callable[[], int]) -> None:
        """RabbitMQ's limits max-connections and max-channels of a user. `count`, without the new one, is only called if
        there is a limit."""
        limit = self._users.user(self._user).limit(f"max-{what}")
        if limit is not None and count() >= limit:
            raise ChannelError(
                NOT_ALLOWED,
                f"connection refused for user '{self._user}': user connection limit ({limit}) is reached"
                if what == "connections"
                else f"number of channels opened for user '{self._user}' has reached the maximum allowed user limit "
                f"of {limit}",
            )

    def check_vhost_limit(self, vhost: VirtualHost, count: Callable[[], int]) -> None:
        limit = limit_of(vhost.limits, CONNECTIONS)
        if limit is not None and count() >= limit:
            refused = f"access to vhost '{vhost.name}' refused for user '{self._user}'"
            raise ChannelError(NOT_ALLOWED, f"{refused}: connection limit ({limit}) is reached")

    def may_claim(self, user: str) -> bool:
        """Whether a message may carry this user_id."""
        return user == self._user or self._users.user(self._user).may_impersonate

    def _refuse(self, kind: str, name: str, right: str) -> None:
        self._refused(f"{right} access to {kind} '{name or DEFAULT_EXCHANGE}'")

    def _refuse_topic(self, exchange: Exchange, key: str, right: str) -> None:
        self._refused(f"{right} access to topic '{key}' in exchange '{exchange.name}'")

    def _refused(self, what: str) -> None:
        text = f"{what} in vhost '{self._vhost}' refused for user '{self._user}'"
        logger.warning("from %s: %s", self._peer, text)
        raise AccessRefused(text)
