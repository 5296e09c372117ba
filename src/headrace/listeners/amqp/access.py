"""What the user of a connection may do in its vhost, with RabbitMQ's checks and in RabbitMQ's words.

A right that is taken away is gone with the next method: what is remembered holds for one version of the users only.
Publishing does not ask for every message: where a key leads is asked once, and forgotten when routes or users change
(see publish.target and Connection.topology_version).
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
REMEMBERED_MAX = 1000


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
        """For passive declarations: any right is enough, as in RabbitMQ 4. Before, none was needed."""
        rights = self.rights()
        if rights is None or not (rights.may_read(name) or rights.may_write(name) or rights.may_configure(name)):
            self._refuse(kind, name, "configure")

    def publish(self, exchange: str) -> bool:
        """Raises unless the user may publish to the exchange. True: with some routing keys only, see write_topic.
        Remembered, for clients whose messages all have a key of their own."""
        if self._publishes_at != self._users.version:
            self._publishes_at = self._users.version
            self._publishes.clear()
        found = self._publishes.get(exchange)
        if found is None:
            self.write(EXCHANGE, exchange)
            rights = self.rights()
            found = rights is None or rights.has_topic_rule(exchange)
            if len(self._publishes) < REMEMBERED_MAX:
                self._publishes[exchange] = found
        return found

    def write_topic(self, exchange: Exchange, key: str) -> None:
        """For each routing key of a message."""
        if not isinstance(exchange, Topic):
            return
        rights = self.rights()
        if rights is None or not rights.may_write_topic(exchange.name, key):
            self._refuse_topic(exchange, key, "write")

    def bind(self, kind: str, destination: str, source: str, exchange: Exchange | None, key: str) -> None:
        """And unbind. The destination is written to by what is read from the source."""
        self.write(kind, destination)
        if (kind == EXCHANGE and not destination) or not source:
            raise AccessRefused("operation not permitted on the default exchange")
        self.read(EXCHANGE, source)
        if isinstance(exchange, Topic):
            rights = self.rights()
            if rights is None or not rights.may_read_topic(exchange.name, key):
                self._refuse_topic(exchange, key, "read")

    def check_limit(self, what: str, count: Callable[[], int]) -> None:
        """max-connections and max-channels of a user, RabbitMQ's. Counted, before this one, only where there is one."""
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
        """Whether a message may say that it is from this user."""
        return user == self._user or self._users.user(self._user).may_impersonate

    def _refuse(self, kind: str, name: str, right: str) -> None:
        self._refused(f"{right} access to {kind} '{name or DEFAULT_EXCHANGE}'")

    def _refuse_topic(self, exchange: Exchange, key: str, right: str) -> None:
        self._refused(f"{right} access to topic '{key}' in exchange '{exchange.name}'")

    def _refused(self, what: str) -> None:
        text = f"{what} in vhost '{self._vhost}' refused for user '{self._user}'"
        logger.warning("from %s: %s", self._peer, text)
        raise AccessRefused(text)
