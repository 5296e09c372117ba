"""Share sessions: a member names its partitions once, and after that only the changes (KIP-932)."""

from collections.abc import Callable
from typing import Any

from headrace.broker.groups.share.groups import ShareGroups
from headrace.listeners.kafka.errors import Code
from headrace.listeners.kafka.groups.share_wakeups import Key

SESSIONS_MAX = 2000
OF_CONNECTION_MAX = 4  # clients need one per connection
PARTITIONS_MAX = 500_000  # in all sessions together
NEW, FINAL = 0, -1
EPOCH_MAX = 0x7FFFFFFF

SessionKey = tuple[str, str]  # group and member


class ShareSession:
    """Ends with its connection; the records that the member had acquired are then released, as in Kafka."""

    def __init__(self, key: SessionKey, owner: set[SessionKey]) -> None:
        self.key = key
        self.owner = owner  # all sessions of the same connection
        self.epoch = 1
        self.is_new = True  # no records were delivered in it yet
        self.wanted: dict[Key, None] = {}
        self.counted = 0  # how many of these are counted in ShareSessions.partitions


class ShareSessions:
    """All sessions of one listener, by group and member."""

    def __init__(self, shares: ShareGroups, elements_max: Callable[[], int]) -> None:
        self._shares = shares
        self._elements_max = elements_max
        self.by_key: dict[SessionKey, ShareSession] = {}
        self.partitions = 0  # in all sessions

    def open(self, own: set[SessionKey], fields: Any) -> tuple[ShareSession | None, Code]:
        """Start, continue or end the session that a request names. own: the connection's sessions, changed here."""
        key = (fields.group_id or "", fields.member_id or "")
        known = self.by_key.get(key)
        if fields.share_session_epoch == NEW:
            if key not in own and len(own) >= OF_CONNECTION_MAX:
                return None, Code.SHARE_SESSION_LIMIT_REACHED
            if known is not None:
                self._end(known)  # the member reconnected before its old connection was seen to be gone
            elif len(self.by_key) >= SESSIONS_MAX:
                return None, Code.SHARE_SESSION_LIMIT_REACHED
            session = self.by_key[key] = ShareSession(key, own)
            own.add(key)
            return session, Code.NONE
        if known is None:
            return None, Code.SHARE_SESSION_NOT_FOUND
        if fields.share_session_epoch == FINAL:
            self._end(known)
            return known, Code.NONE
        if fields.share_session_epoch != known.epoch:
            return None, Code.INVALID_SHARE_SESSION_EPOCH
        known.epoch = known.epoch + 1 if known.epoch < EPOCH_MAX else 1
        return known, Code.NONE

    def update(self, session: ShareSession, fields: Any) -> bool:
        """Apply the partitions that a request adds and forgets. False: there is no room for them, so the session is
        over and the records that the member had acquired are released."""
        for topic in fields.forgotten_topics_data:
            for number in topic.partitions:
                session.wanted.pop((topic.topic_id, number), None)
        for topic in fields.topics:
            for part in topic.partitions:
                session.wanted[topic.topic_id, part.partition_index] = None
        size = len(session.wanted)
        grown = size - session.counted
        if grown > 0 and (size > self._elements_max() or self.partitions + grown > PARTITIONS_MAX):
            self._end(session)
            self._shares.release(*session.key)
            return False
        if self.by_key.get(session.key) is session:  # not one that ends with this request
            self.partitions += grown
            session.counted = size
        return True

    def end_all(self, own: set[SessionKey]) -> None:
        """The connection of these sessions is gone: their members' records are released."""
        for key in list(own):
            self._end(self.by_key[key])
            self._shares.release(*key)

    def _end(self, session: ShareSession) -> None:
        if self.by_key.get(session.key) is session:
            del self.by_key[session.key]
            session.owner.discard(session.key)
            self.partitions -= session.counted
