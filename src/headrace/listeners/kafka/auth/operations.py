"""What a user may do with a topic, a group or the broker, for those who ask: Kafka's operations, a bit each.
Where nobody need say who he is, these are the same as of a Kafka without an authorizer."""

from headrace.listeners.kafka.auth.access import AnyUser
from headrace.wire.kafka.metadata import UNKNOWN_OPERATIONS

READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, CLUSTER_ACTION, DESCRIBE_CONFIGS, ALTER_CONFIGS, IDEMPOTENT_WRITE = (
    1 << bit for bit in range(3, 13)
)
LOOKS = DESCRIBE | DESCRIBE_CONFIGS
ADMINISTERS = CREATE | ALTER | CLUSTER_ACTION | DESCRIBE_CONFIGS | ALTER_CONFIGS


def on_topic(allowed: AnyUser, name: str) -> int:
    found = READ if allowed.reads.shows(name) else 0
    found |= WRITE if allowed.writes.shows(name) else 0
    found |= CREATE | DELETE | ALTER | ALTER_CONFIGS if allowed.configures.shows(name) else 0
    return found | LOOKS if found else 0


def on_group(allowed: AnyUser, group_id: str, *, asked: bool) -> int:
    if not asked:
        return UNKNOWN_OPERATIONS
    found = READ | DELETE | LOOKS if allowed.shows_group(group_id) else 0
    return found | (ALTER_CONFIGS if allowed.changes_group(group_id) else 0)


def on_cluster(allowed: AnyUser, *, asked: bool) -> int:
    if not asked:
        return UNKNOWN_OPERATIONS
    anybodys = DESCRIBE | IDEMPOTENT_WRITE
    return anybodys | ADMINISTERS if allowed.is_administrator else anybodys
