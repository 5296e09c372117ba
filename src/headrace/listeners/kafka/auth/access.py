"""Authorization: RabbitMQ's permissions (read, write, configure) applied to Kafka's resources.

Topics, groups and transactional ids are names in the default vhost. RULES states the permissions that each API needs;
where a request names several resources, each is checked where it is looked up (see GuardedTopics). A revoked permission
is gone with the next request, because an Access is made for one version of the users (see gate.LoginGate). While the
broker is open, connections have no Access and everything is allowed.
"""

import logging
from collections.abc import Callable
from typing import Any

from headrace.broker.access.permissions import Rights
from headrace.broker.access.users import User
from headrace.broker.streams.streams import Stream
from headrace.errors import AccessRefused
from headrace.listeners.kafka.admin.topic_index import Topics
from headrace.listeners.kafka.errors import (
    ClusterRefused,
    Code,
    GroupRefused,
    TopicRefused,
    TransactionRefused,
    code_of,
)
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.metadata import UNKNOWN_OPERATIONS

logger = logging.getLogger("headrace.kafka")

REMEMBERED_MAX = 1000  # results per connection: clients choose the names
READ, WRITE, CONFIGURE, DESCRIBE = "read", "write", "configure", "describe"
CHECKS: dict[str, Callable[[Rights, str], bool]] = {
    READ: Rights.may_read,
    WRITE: Rights.may_write,
    CONFIGURE: Rights.may_configure,
    DESCRIBE: lambda rights, name: rights.may_read(name) or rights.may_write(name) or rights.may_configure(name),
}


class AnyUser:
    """Permissions while the broker is open: everything is allowed. Also the interface of Access."""

    def __init__(self, topics: Topics) -> None:
        """The topics that may be read, written and configured; `sees` needs any permission on a topic."""
        self.reads = self.writes = self.configures = self.sees = topics

    def group(self, group_id: str | None) -> None:
        """Raise GroupRefused unless the user may read the group."""

    def configure_group(self, group_id: str) -> None: ...

    def transaction(self, transactional_id: str) -> None: ...

    def administer(self) -> None:
        """Raise ClusterRefused unless the user is an administrator."""

    @property
    def is_administrator(self) -> bool:
        return True

    def changes_group(self, group_id: str) -> bool:
        return True

    def shows_group(self, group_id: str) -> bool:
        """Whether the group is included in lists."""
        return True

    def shows_transaction(self, transactional_id: str) -> bool:
        return True


class Access(AnyUser):
    """The permissions of one user. rights is None if the user may not access the vhost."""

    def __init__(self, user: User, rights: Rights | None, topics: Topics, peer: Any) -> None:
        self._user, self._rights, self._peer = user, rights, peer
        self._known: dict[tuple[str, str], bool] = {}
        self._logged: set[str] = set()
        self.reads = GuardedTopics(topics, self, READ)
        self.writes = GuardedTopics(topics, self, WRITE)
        self.configures = GuardedTopics(topics, self, CONFIGURE)
        self.sees = GuardedTopics(topics, self, DESCRIBE)

    def may(self, right: str, name: str) -> bool:
        found = self._known.get((right, name))
        if found is None:
            found = self._rights is not None and CHECKS[right](self._rights, name)
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            self._known[right, name] = found
        return found

    def topic(self, right: str, name: str) -> None:
        if not self.may(right, name):
            raise TopicRefused(self._refused(right, "topic", name))

    def group(self, group_id: str | None) -> None:
        if not self.may(READ, group_id or ""):
            raise GroupRefused(self._refused(READ, "group", group_id or ""))

    def configure_group(self, group_id: str) -> None:
        if not self.may(CONFIGURE, group_id):
            raise GroupRefused(self._refused(CONFIGURE, "group", group_id))

    def transaction(self, transactional_id: str) -> None:
        if not self.may(WRITE, transactional_id):
            raise TransactionRefused(self._refused(WRITE, "transactional id", transactional_id))

    def administer(self) -> None:
        if not self._user.is_administrator:
            self._log_once(text := f"user {self._user.name!r} needs the administrator tag for this request")
            raise ClusterRefused(text)

    @property
    def is_administrator(self) -> bool:
        return self._user.is_administrator

    def changes_group(self, group_id: str) -> bool:
        return self.may(CONFIGURE, group_id)

    def shows_group(self, group_id: str) -> bool:
        return self.may(READ, group_id)

    def shows_transaction(self, transactional_id: str) -> bool:
        return self.may(WRITE, transactional_id)

    def _refused(self, right: str, kind: str, name: str) -> str:
        text = f"user {self._user.name!r} has no permission to {right} {kind} {name[:255]!r}"
        self._log_once(text)
        return text

    def _log_once(self, text: str) -> None:
        """Clients repeat refused requests."""
        if text not in self._logged and len(self._logged) < REMEMBERED_MAX:
            self._logged.add(text)
            logger.warning("from %s: %s", self._peer, text)


class GuardedTopics(Topics):
    """The topics on which a user has one permission. Does not reveal whether other topics exist."""

    def __init__(self, topics: Topics, access: Access, right: str) -> None:
        self._topics, self._access, self._right = topics, access, right

    def find(self, topic: str | bytes) -> Stream:
        if isinstance(topic, str):
            self._access.topic(self._right, topic)
            return self._topics.find(topic)
        stream = self._topics.find(topic)
        self._access.topic(self._right, stream.name)
        return stream

    def check(self, name: str) -> None:
        self._access.topic(self._right, name)

    def shows(self, name: str) -> bool:
        return self._access.may(self._right, name)

    def all(self) -> list[Stream]:
        return [stream for stream in self._topics.all() if self.shows(stream.name)]


# Permissions that a whole request needs: without them the response is only an error code.
Need = Callable[[AnyUser, Any], None]


def _group(allowed: AnyUser, fields: Any) -> None:
    allowed.group(fields.group_id)


def _transaction(allowed: AnyUser, fields: Any) -> None:
    if fields.transactional_id is not None:
        allowed.transaction(fields.transactional_id)


def _subscription(allowed: AnyUser, fields: Any) -> None:
    for name in fields.subscribed_topic_names or ():
        allowed.sees.check(name)


def _administrator(allowed: AnyUser, fields: Any) -> None:
    allowed.administer()


ANYBODY: tuple[Need, ...] = ()  # every authenticated user
BY_NAME: tuple[Need, ...] = ()  # the handler checks each resource that the request names

RULES: dict[Api, tuple[Need, ...]] = {
    # Before a login: see login.BEFORE_LOGIN.
    Api.API_VERSIONS: ANYBODY,
    Api.SASL_HANDSHAKE: ANYBODY,
    Api.SASL_AUTHENTICATE: ANYBODY,
    # Topics.
    Api.PRODUCE: BY_NAME,  # write
    Api.FETCH: BY_NAME,  # read
    Api.LIST_OFFSETS: BY_NAME,
    Api.OFFSET_FOR_LEADER_EPOCH: BY_NAME,
    Api.DESCRIBE_PRODUCERS: BY_NAME,
    Api.METADATA: BY_NAME,  # any permission; configure to create a topic
    Api.DESCRIBE_TOPIC_PARTITIONS: BY_NAME,
    Api.CREATE_TOPICS: BY_NAME,  # configure
    Api.DELETE_TOPICS: BY_NAME,
    Api.CREATE_PARTITIONS: BY_NAME,
    Api.DELETE_RECORDS: BY_NAME,
    Api.DESCRIBE_CONFIGS: BY_NAME,  # topics: any permission; groups: read; broker: administrator
    Api.ALTER_CONFIGS: BY_NAME,  # topics and groups: configure; broker: administrator
    Api.INCREMENTAL_ALTER_CONFIGS: BY_NAME,
    # Groups: read, and read on the topics in the request.
    Api.FIND_COORDINATOR: BY_NAME,
    Api.JOIN_GROUP: (_group,),
    Api.SYNC_GROUP: (_group,),
    Api.HEARTBEAT: (_group,),
    Api.LEAVE_GROUP: (_group,),
    Api.LIST_GROUPS: BY_NAME,
    Api.DESCRIBE_GROUPS: BY_NAME,
    Api.DELETE_GROUPS: BY_NAME,
    Api.OFFSET_COMMIT: BY_NAME,
    Api.OFFSET_FETCH: BY_NAME,
    Api.OFFSET_DELETE: (_group,),
    Api.CONSUMER_GROUP_HEARTBEAT: (_group, _subscription),
    Api.CONSUMER_GROUP_DESCRIBE: BY_NAME,
    Api.SHARE_GROUP_HEARTBEAT: (_group, _subscription),
    Api.SHARE_GROUP_DESCRIBE: BY_NAME,
    Api.SHARE_FETCH: (_group,),
    Api.SHARE_ACKNOWLEDGE: (_group,),
    Api.DESCRIBE_SHARE_GROUP_OFFSETS: BY_NAME,
    Api.ALTER_SHARE_GROUP_OFFSETS: (_group,),
    Api.DELETE_SHARE_GROUP_OFFSETS: (_group,),
    # Transactional ids: write.
    Api.INIT_PRODUCER_ID: (_transaction,),
    Api.ADD_PARTITIONS_TO_TXN: BY_NAME,
    Api.ADD_OFFSETS_TO_TXN: (_transaction, _group),
    Api.TXN_OFFSET_COMMIT: BY_NAME,
    Api.END_TXN: (_transaction,),
    Api.DESCRIBE_TRANSACTIONS: BY_NAME,
    Api.LIST_TRANSACTIONS: BY_NAME,
    # The broker.
    Api.DESCRIBE_CLUSTER: ANYBODY,
    Api.GET_TELEMETRY_SUBSCRIPTIONS: ANYBODY,
    Api.PUSH_TELEMETRY: ANYBODY,
    Api.DESCRIBE_DELEGATION_TOKEN: ANYBODY,  # there are none
    Api.DESCRIBE_ACLS: ANYBODY,  # there are none
    Api.CREATE_ACLS: ANYBODY,
    Api.DELETE_ACLS: ANYBODY,
    Api.UNREGISTER_BROKER: (_administrator,),
    Api.DESCRIBE_QUORUM: (_administrator,),
    Api.UPDATE_FEATURES: (_administrator,),
    Api.DESCRIBE_LOG_DIRS: (_administrator,),
    Api.ALTER_REPLICA_LOG_DIRS: BY_NAME,  # administrator; the response has no top-level error
    Api.ELECT_LEADERS: (_administrator,),
    Api.ALTER_PARTITION_REASSIGNMENTS: (_administrator,),
    Api.LIST_PARTITION_REASSIGNMENTS: (_administrator,),
    Api.LIST_CONFIG_RESOURCES: (_administrator,),
    Api.DESCRIBE_CLIENT_QUOTAS: (_administrator,),
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: (_administrator,),
    Api.ALTER_USER_SCRAM_CREDENTIALS: BY_NAME,  # administrator; the response has no top-level error
}


def refusal(access: Access, api: Api, fields: Any) -> Code | None:
    """The error code if the whole request is refused."""
    try:
        for need in RULES[api]:
            need(access, fields)
    except AccessRefused as error:
        return code_of(error)
    return None


# Kafka's operations, one bit each, for clients that ask which ones they may use. While the broker is open, these are
# the operations that a Kafka broker without an authorizer returns.


class Operation:
    """Bits of the authorized operations in Metadata, DescribeGroups and DescribeCluster responses."""

    READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, CLUSTER_ACTION, DESCRIBE_CONFIGS, ALTER_CONFIGS, IDEMPOTENT_WRITE = (
        1 << bit for bit in range(3, 13)
    )
    LOOK = DESCRIBE | DESCRIBE_CONFIGS
    ADMINISTER = CREATE | ALTER | CLUSTER_ACTION | DESCRIBE_CONFIGS | ALTER_CONFIGS


def operations_on_topic(allowed: AnyUser, name: str) -> int:
    found = Operation.READ if allowed.reads.shows(name) else 0
    found |= Operation.WRITE if allowed.writes.shows(name) else 0
    if allowed.configures.shows(name):
        found |= Operation.CREATE | Operation.DELETE | Operation.ALTER | Operation.ALTER_CONFIGS
    return found | Operation.LOOK if found else 0


def operations_on_group(allowed: AnyUser, group_id: str, *, asked: bool) -> int:
    if not asked:
        return UNKNOWN_OPERATIONS
    found = Operation.READ | Operation.DELETE | Operation.LOOK if allowed.shows_group(group_id) else 0
    return found | (Operation.ALTER_CONFIGS if allowed.changes_group(group_id) else 0)


def operations_on_cluster(allowed: AnyUser, *, asked: bool) -> int:
    if not asked:
        return UNKNOWN_OPERATIONS
    found = Operation.DESCRIBE | Operation.IDEMPOTENT_WRITE
    return found | Operation.ADMINISTER if allowed.is_administrator else found
