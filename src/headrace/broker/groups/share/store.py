"""How share groups are stored: members and progress, in two tables of the state."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from headrace.broker.groups.share.group import ShareGroup
from headrace.broker.groups.share.members import SHARE_MEMBERS, ShareMember, restored
from headrace.broker.groups.share.partition import SavedShare, SharePartition
from headrace.errors import HeadraceError
from headrace.log.commit.atomic_group import AtomicGroup as Entry
from headrace.log.shard import Shard

SHARES = "shares"


class ShareStore:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def partitions(self) -> Iterator[tuple[str, int, SavedShare]]:
        """(group id, log id, progress) of every log that exists."""
        for key, value in self._shard.state.items(SHARES):
            group_id, _, log_id = key.rpartition(b"\0")
            if int(log_id) in self._shard.logs:
                yield group_id.decode(), int(log_id), msgspec.msgpack.decode(value, type=SavedShare)

    def members(self) -> Iterator[tuple[str, ShareMember]]:
        for key, value in self._shard.state.items(SHARE_MEMBERS):
            group_id, _, member_id = key.partition(b"\0")
            yield group_id.decode(), restored(member_id.decode(), value)

    def has_log(self, log_id: int) -> bool:
        return log_id in self._shard.logs

    # Durable on return.

    async def put(self, group: ShareGroup, shares: Mapping[int, SharePartition]) -> None:
        entry = self._shard.group()
        self._put(entry, group, shares)
        await entry.commit()

    async def delete(self, group: ShareGroup, log_ids: Iterable[int]) -> None:
        entry = self._shard.group()
        self._delete(entry, group, log_ids)
        await entry.commit()

    # Not awaited: what a crash loses is done again.

    def put_later(self, group: ShareGroup, shares: Mapping[int, SharePartition]) -> None:
        self._stage(lambda entry: self._put(entry, group, shares))

    def delete_later(self, group: ShareGroup, log_ids: Iterable[int]) -> None:
        self._stage(lambda entry: self._delete(entry, group, log_ids))

    def put_member(self, group: ShareGroup, member: ShareMember) -> None:
        """Store a member if it has changed."""
        now = member.save()
        if now != member.saved:
            member.saved = now
            self._stage(lambda entry: entry.put(SHARE_MEMBERS, member_key(group, member), now))

    def delete_member(self, group: ShareGroup, member: ShareMember) -> None:
        self._stage(lambda entry: entry.delete(SHARE_MEMBERS, member_key(group, member)))

    def _stage(self, change: Callable[[Entry], None]) -> None:
        entry = self._shard.group()
        change(entry)
        try:
            entry.commit(lazy=True)
        except HeadraceError:
            pass  # callers that wait for durability get the disk's error

    @staticmethod
    def _put(entry: Entry, group: ShareGroup, shares: Mapping[int, SharePartition]) -> None:
        for log_id, share in shares.items():
            entry.put(SHARES, share_key(group, log_id), share.save())

    @staticmethod
    def _delete(entry: Entry, group: ShareGroup, log_ids: Iterable[int]) -> None:
        for log_id in log_ids:
            entry.delete(SHARES, share_key(group, log_id))


def share_key(group: ShareGroup, log_id: int) -> bytes:
    return group.group_id.encode() + b"\0" + str(log_id).encode()


def member_key(group: ShareGroup, member: ShareMember) -> bytes:
    return group.group_id.encode() + b"\0" + member.member_id.encode()
