"""The roster of a classic group: members by id, static members by instance id, and member ids not used yet."""

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from headrace.broker.groups.classic.members import Join, Member, Protocols
from headrace.broker.groups.member_budget import MemberBudget, classic_bytes
from headrace.broker.groups.settings import GroupSettings
from headrace.broker.groups.timers import Timer, Timers
from headrace.errors import (
    FencedInstance,
    GroupFull,
    InconsistentProtocol,
    MemberIdRequired,
    UnknownMember,
)

NAME_CHARS_MAX = 1000  # of the client's name in a member id; the leader receives the ids of all members


def new_id(name: str) -> str:
    return f"{name[:NAME_CHARS_MAX]}-{uuid.uuid4()}"


class Roster:
    """Owned by its group, which is notified when a static member is replaced and when an unused id expires."""

    def __init__(
        self,
        group_id: str,
        settings: GroupSettings,
        timers: Timers,
        budget: MemberBudget,
        *,
        on_replaced: Callable[[Member, str], None],
        on_forgotten: Callable[[], None],
    ) -> None:
        self.members: dict[str, Member] = {}
        self.protocol_type = ""
        self._group_id = group_id
        self._settings = settings
        self._timers = timers
        self._budget = budget
        self._on_replaced = on_replaced
        self._on_forgotten = on_forgotten
        self._speakers: Counter[str] = (
            Counter()
        )  # protocol -> number of members that support it; avoids a scan for every join
        self._instances: dict[str, str] = {}
        self._pending: dict[str, Timer] = {}

    def close(self) -> None:
        for member_id in list(self._pending):
            self.forget_expected(member_id)
        self.release_memory()

    def release_memory(self) -> None:
        """Stop accounting for the members; another group does from now on."""
        for member in self.members.values():
            self._budget.keep(member, 0)

    def reclaim_memory(self) -> None:
        for member in self.members.values():
            self._weigh(member)

    @property
    def is_expecting(self) -> bool:
        """Whether a member id was given out that has not joined yet."""
        return bool(self._pending)

    # Joining.

    def admit(self, join: Join) -> Member:
        """Return the joining member, new or known. Raises if it may not join."""
        self._settings.check_session_timeout(join.session_timeout_ms)
        self._check_protocols(join)
        self._check_bytes(join)
        if join.instance_id is not None:
            return self._admit_static(join)
        if join.member_id:
            if self.forget_expected(join.member_id):  # the id has reserved a place in the group
                return self._add(join, join.member_id)
            return self.member(join.member_id)
        self._check_room()
        member_id = new_id(join.client_id or "member")
        if join.id_required:
            self._expect(member_id, join.session_timeout_ms)
            raise MemberIdRequired(member_id)
        return self._add(join, member_id)

    def _admit_static(self, join: Join) -> Member:
        assert join.instance_id is not None
        known = self._instances.get(join.instance_id)
        if join.member_id:
            if known is None:
                raise UnknownMember(f"no static member {join.instance_id!r}")
            if known != join.member_id:
                raise FencedInstance(f"{join.instance_id!r} is {known!r} now")
            return self.members[known]
        member_id = new_id(join.instance_id)
        if known is None:
            self._check_room()
            return self._add(join, member_id)
        return self._replace_static(join.instance_id, known, member_id)

    def _replace_static(self, instance_id: str, known: str, member_id: str) -> Member:
        """A restarted static member takes its old place under a new id."""
        member = self.members.pop(known)
        member.member_id = member_id
        self.members[member_id] = member
        self._instances[instance_id] = member_id
        self._on_replaced(member, known)
        return member

    def _check_room(self) -> None:
        if len(self.members) + len(self._pending) >= self._settings.members_max:
            raise GroupFull(f"group {self._group_id!r} has {self._settings.members_max} members")

    def _check_bytes(self, join: Join) -> None:
        known = join.member_id if join.instance_id is None else self._instances.get(join.instance_id, "")
        before = self.members.get(known)
        if before is None:
            self._budget.check(classic_bytes(join.member_id, join.protocols))
        else:
            self._budget.check(classic_bytes(known, join.protocols, before.assignment) - before.kept_bytes)

    def _check_protocols(self, join: Join) -> None:
        if not join.protocol_type or not join.protocols:
            raise InconsistentProtocol("a member must name a protocol type and at least one protocol")
        before = self.members.get(join.member_id)
        others = len(self.members) - (before is not None)
        if not others:
            return
        if join.protocol_type != self.protocol_type:
            raise InconsistentProtocol(
                f"the group has protocol type {self.protocol_type!r}, not {join.protocol_type!r}"
            )
        own = before.names if before is not None else frozenset()
        if not any(self._speakers[name] - (name in own) == others for name in join.names):
            raise InconsistentProtocol("the members have no protocol in common")

    def _expect(self, member_id: str, session_timeout_ms: int) -> None:
        def expire() -> None:
            self.forget_expected(member_id)
            self._on_forgotten()

        self._budget.take(classic_bytes(member_id, ()))
        self._pending[member_id] = self._timers.call_later(session_timeout_ms / 1000, expire)

    def _add(self, join: Join, member_id: str) -> Member:
        member = Member(
            member_id=member_id,
            instance_id=join.instance_id,
            client_id=join.client_id,
            client_host=join.client_host,
            session_timeout_ms=join.session_timeout_ms,
            rebalance_timeout_ms=join.rebalance_timeout_ms,
            protocols=join.protocols,
        )
        if not self.members:
            self.protocol_type = join.protocol_type
        self.restore(member)
        return member

    def restore(self, member: Member) -> None:
        self.members[member.member_id] = member
        self._speakers.update(member.names)
        self._weigh(member)
        if member.instance_id is not None:
            self._instances[member.instance_id] = member.member_id

    # Membership.

    def change_protocols(self, member: Member, protocols: Protocols) -> None:
        self._forget_names(member.names)
        member.protocols = protocols
        self._speakers.update(member.names)
        self._weigh(member)

    def check_assignments(self, assignments: Mapping[str, bytes]) -> None:
        """Raise if the assignments exceed the memory budget. Assignments to unknown members are dropped."""
        members = self.members.items()
        self._budget.check(
            sum(
                classic_bytes(member_id, member.protocols, assignments.get(member_id, b"")) - member.kept_bytes
                for member_id, member in members
            )
        )

    def assign(self, member: Member, assignment: bytes) -> None:
        member.assignment = assignment
        self._weigh(member)

    def _weigh(self, member: Member) -> None:
        self._budget.keep(member, classic_bytes(member.member_id, member.protocols, member.assignment))

    def _forget_names(self, names: Collection[str]) -> None:
        self._speakers.subtract(names)
        for name in names:
            if not self._speakers[name]:
                del self._speakers[name]

    def is_spoken_by_all(self, protocol: str) -> bool:
        return self._speakers[protocol] == len(self.members)

    def member(self, member_id: str) -> Member:
        try:
            return self.members[member_id]
        except KeyError:
            raise UnknownMember(f"no member {member_id!r} in group {self._group_id!r}") from None

    def check_instance(self, member_id: str, instance_id: str | None) -> None:
        """Raise if no member has this instance id, or another member has it by now."""
        if instance_id is None:
            return
        known = self._instances.get(instance_id)
        if known is None:
            raise UnknownMember(f"no static member {instance_id!r}")
        if known != member_id:
            raise FencedInstance(f"{instance_id!r} is {known!r} now")

    def id_of(self, instance_id: str) -> str | None:
        return self._instances.get(instance_id)

    # Leaving.

    def forget_expected(self, member_id: str) -> bool:
        """Forget an unused member id; False if the id was not one."""
        timer = self._pending.pop(member_id, None)
        if timer is not None:
            timer.cancel()
            self._budget.take(-classic_bytes(member_id, ()))
        return timer is not None

    def remove(self, member: Member) -> None:
        del self.members[member.member_id]
        self._forget_names(member.names)
        self._budget.keep(member, 0)
        if member.instance_id is not None and self._instances.get(member.instance_id) == member.member_id:
            del self._instances[member.instance_id]
