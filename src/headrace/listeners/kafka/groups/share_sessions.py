"""Share sessions: a member says once which partitions it takes records from, then only what changed."""

from typing import TYPE_CHECKING, Any

from headrace.listeners.kafka.errors import Code
from headrace.listeners.kafka.groups.share_wakeups import Key

if TYPE_CHECKING:
    from headrace.listeners.kafka.connection import Connection
    from headrace.listeners.kafka.listener import KafkaListener

SESSIONS_MAX = 2000
OF_CONNECTION_MAX = 4  # clients have one on each connection
PARTITIONS_MAX = 500_000  # in all sessions together
NEW, FINAL = 0, -1
EPOCH_MAX = 0x7FFFFFFF

SessionKey = tuple[str, str]  # group and member


class ShareSession:
    """One connection's, and gone with it: what the member held comes back then, as in Kafka."""

    def __init__(self, key: SessionKey, owner: set[SessionKey]) -> None:
        self.key = key
        self.owner = owner  # the sessions of its connection
        self.epoch = 1
        self.is_new = True  # and nothing was handed out in it
        self.wanted: dict[Key, None] = {}
        self.counted = 0  # of these, in listener.share_session_partitions


def open_session(listener: "KafkaListener", connection: "Connection", fields: Any) -> tuple[ShareSession | None, Code]:
    key = (fields.group_id or "", fields.member_id or "")
    known: ShareSession | None = listener.share_sessions.get(key)
    if fields.share_session_epoch == NEW:
        own = connection.share_sessions
        if key not in own and len(own) >= OF_CONNECTION_MAX:
            return None, Code.SHARE_SESSION_LIMIT_REACHED
        if known is not None:
            end_session(listener, known)  # the member came back before we knew that it was gone
        elif len(listener.share_sessions) >= SESSIONS_MAX:
            return None, Code.SHARE_SESSION_LIMIT_REACHED
        session = listener.share_sessions[key] = ShareSession(key, own)
        own.add(key)
        return session, Code.NONE
    if known is None:
        return None, Code.SHARE_SESSION_NOT_FOUND
    if fields.share_session_epoch == FINAL:
        end_session(listener, known)
        return known, Code.NONE
    if fields.share_session_epoch != known.epoch:
        return None, Code.INVALID_SHARE_SESSION_EPOCH
    known.epoch = known.epoch + 1 if known.epoch < EPOCH_MAX else 1
    return known, Code.NONE


def update(listener: "KafkaListener", session: ShareSession, fields: Any) -> bool:
    """Whether there is room for what the request adds. Else it is over, and what the member held is the others'."""
    for topic in fields.forgotten_topics_data:
        for number in topic.partitions:
            session.wanted.pop((topic.topic_id, number), None)
    for topic in fields.topics:
        for part in topic.partitions:
            session.wanted[topic.topic_id, part.partition_index] = None
    size = len(session.wanted)
    grown = size - session.counted
    if grown > 0 and (size > listener.elements_max or listener.share_session_partitions + grown > PARTITIONS_MAX):
        end_session(listener, session)
        listener.coordination.shares.release(*session.key)
        return False
    if listener.share_sessions.get(session.key) is session:  # not one that ends with this request
        listener.share_session_partitions += grown
        session.counted = size
    return True


def end_session(listener: "KafkaListener", session: ShareSession) -> None:
    if listener.share_sessions.get(session.key) is session:
        del listener.share_sessions[session.key]
        session.owner.discard(session.key)
        listener.share_session_partitions -= session.counted
