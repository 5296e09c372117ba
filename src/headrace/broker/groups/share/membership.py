"""The members of share groups: heartbeats, assignments and session timeouts."""

import uuid
from collections.abc import Callable, Mapping

from headrace.broker.groups.config_store import GroupConfigs
from headrace.broker.groups.coordinator import check_group_id
from headrace.broker.groups.member_budget import MEMBER_BYTES, NAME_BYTES, MemberBudget, topics_bytes
from headrace.broker.groups.share.group import ShareGroup
from headrace.broker.groups.share.members import ShareMember, check_sizes
from headrace.broker.groups.share.store import ShareStore
from headrace.broker.groups.timers import Timers
from headrace.clock import Clock
from headrace.errors import FencedMemberEpoch, GroupFull, InvalidInput, UnknownMember

JOIN_EPOCH, LEAVE_EPOCH = 0, -1
MEMBERS_MAX = 10_000


class ShareMembership:
    """Shares `groups` with ShareGroups. `on_expired` is called with a member whose session has timed out."""

    def __init__(
        self,
        groups: dict[str, ShareGroup],
        store: ShareStore,
        configs: GroupConfigs,
        clock: Clock,
        timers: Timers,
        topics: Callable[[], Mapping[str, int]],
        budget: MemberBudget,
        on_expired: Callable[[ShareGroup, str], None],
    ) -> None:
        self._groups = groups
        self._store = store
        self._configs = configs
        self._clock = clock
        self._timers = timers
        self._topics = topics
        self._budget = budget
        self._on_expired = on_expired

    def restore(self, group: ShareGroup, member: ShareMember) -> None:
        group.members[member.member_id] = member
        self._budget.keep(member, _member_bytes(member.topics, len(member.assigned)))
        group.epoch = max(group.epoch, member.epoch)
        self._keep_alive(group, member)  # it has one session timeout to send a heartbeat

    def close(self) -> None:
        for group in self._groups.values():
            for member in group.members.values():
                if member.timer is not None:
                    member.timer.cancel()

    def heartbeat(
        self,
        group_id: str,
        member_id: str,
        epoch: int,
        *,
        client_id: str,
        client_host: str,
        rack_id: str | None,
        topics: frozenset[str] | None,
    ) -> tuple[ShareMember, bool]:
        """Return the member, and whether its assignment must be sent."""
        check_sizes(member_id, client_id, rack_id, topics)
        if topics is not None:
            self._check_room(group_id, member_id, topics)
        if epoch == JOIN_EPOCH:
            group, member = self._join(group_id, member_id, topics)
        else:
            group, member = self._known_member(group_id, member_id)
        if epoch == LEAVE_EPOCH:
            self._drop(group, member)
            member.epoch = LEAVE_EPOCH
            return member, False
        if epoch not in (JOIN_EPOCH, member.epoch, member.previous_epoch):
            raise FencedMemberEpoch(f"epoch {epoch}, but the member is at {member.epoch}")
        member.client_id, member.client_host, member.rack_id = client_id, client_host, rack_id
        if topics is not None:
            member.topics = topics
        self._keep_alive(group, member)
        counts = self._topics()
        wanted = frozenset(
            (topic, number) for topic in member.topics if topic in counts for number in range(counts[topic])
        )
        is_news = wanted != member.assigned or epoch == JOIN_EPOCH or member.is_outdated
        if is_news:
            member.is_outdated = False
            group.epoch += 1
            member.previous_epoch, member.epoch = epoch, group.epoch
            member.assigned = wanted
        if is_news or topics is not None:  # names of topics that do not exist count too
            self._budget.keep(member, _member_bytes(member.topics, len(wanted)))
        self._store.put_member(group, member)
        return member, is_news or epoch != member.epoch

    def _check_room(self, group_id: str, member_id: str, topics: frozenset[str]) -> None:
        group, counts = self._groups.get(group_id), self._topics()
        before = None if group is None else group.members.get(member_id)
        partitions = sum(counts.get(topic, 0) for topic in topics)
        self._budget.check(_member_bytes(topics, partitions) - (0 if before is None else before.kept_bytes))

    def _join(self, group_id: str, member_id: str, topics: frozenset[str] | None) -> tuple[ShareGroup, ShareMember]:
        check_group_id(group_id)
        if topics is None:
            raise InvalidInput("a joining member must send its subscription")
        group = self._groups.get(group_id) or ShareGroup(group_id)
        member = group.members.get(member_id)
        if member is None:
            if len(group.members) >= MEMBERS_MAX:
                raise GroupFull(f"group {group_id!r} has {MEMBERS_MAX} members")
            member = ShareMember(member_id or str(uuid.uuid4()))
            group.members[member.member_id] = member
        self._groups[group_id] = group
        return group, member

    def _known_member(self, group_id: str, member_id: str) -> tuple[ShareGroup, ShareMember]:
        group = self._groups.get(group_id)
        member = group.members.get(member_id) if group is not None else None
        if group is None or member is None:
            raise UnknownMember(f"no member {member_id!r} in group {group_id!r}")
        return group, member

    def _keep_alive(self, group: ShareGroup, member: ShareMember) -> None:
        session_s = self._configs.get(group.group_id).session_timeout_ms / 1000
        member.deadline = self._clock.monotonic() + session_s
        if member.timer is None:
            member.timer = self._timers.call_later(session_s, lambda: self._session_over(group, member))

    def _session_over(self, group: ShareGroup, member: ShareMember) -> None:
        member.timer = None
        if group.members.get(member.member_id) is not member:
            return
        left_s = member.deadline - self._clock.monotonic()
        if left_s > 0:
            member.timer = self._timers.call_later(left_s, lambda: self._session_over(group, member))
        else:
            self._drop(group, member)
            self._on_expired(group, member.member_id)

    def _drop(self, group: ShareGroup, member: ShareMember) -> None:
        """Remove a member. Its acquired records stay locked until its share session or the locks end: a member may
        leave first and acknowledge afterwards."""
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        group.members.pop(member.member_id, None)
        self._budget.keep(member, 0)
        self._store.delete_member(group, member)
        group.epoch += 1
        if not group.members and not group.partitions:
            self._groups.pop(group.group_id, None)


def _member_bytes(topics: frozenset[str], partitions: int) -> int:
    return MEMBER_BYTES + topics_bytes(topics) + NAME_BYTES * partitions
