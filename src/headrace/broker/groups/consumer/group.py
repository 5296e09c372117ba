"""A group of the consumer protocol (KIP-848): the broker computes the assignment, members reconcile in heartbeats.

The group's epoch increases with every change of members or topics. For each epoch there is a target assignment. A
member moves towards its target independently: it first revokes what is not in the target (and acknowledges that in a
heartbeat), then it takes what other members have revoked. It reaches the group's epoch once it holds nothing that the
target gives to another member. A member waits only for members that hold its partitions.

The group may also host members of the classic protocol (see classic_members.py): they take the same steps by rejoining.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headrace.broker.groups.assign import ASSIGNORS, DEFAULT_ASSIGNOR, TopicPartition
from headrace.broker.groups.config import DEFAULTS, GroupConfig
from headrace.broker.groups.consumer.members import ClassicSide, ConsumerMember, MemberState
from headrace.broker.groups.consumer.sessions import Sessions
from headrace.broker.groups.member_budget import MemberBudget, assigned_bytes, classic_bytes, topics_bytes
from headrace.broker.groups.settings import GroupSettings
from headrace.broker.groups.subscription_patterns import Matches, compile_pattern
from headrace.broker.groups.timers import Timers
from headrace.clock import Clock
from headrace.errors import (
    FencedInstance,
    FencedMemberEpoch,
    GroupFull,
    IllegalGeneration,
    InvalidInput,
    StaleMemberEpoch,
    UnknownMember,
    UnreleasedInstance,
    UnsupportedAssignor,
)

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
STATIC_LEAVE_EPOCH = -2  # a static member that intends to return
ID_CHARACTERS_MAX = 1_100  # of a member or instance id: the longest id that we generate, and some slack
NAMES_CHARACTERS_MAX = 1 << 20  # of all subscribed topic names of a member


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A ConsumerGroupHeartbeat request. None means unchanged since the last one."""

    member_id: str
    epoch: int
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topics: frozenset[str] | None = None
    pattern: str | None = None
    assignor: str | None = None
    owned: frozenset[TopicPartition] | None = None
    may_read: Callable[[str], bool] | None = None  # the topics that its pattern may match; None: all


@dataclass(frozen=True, slots=True)
class Answer:
    member_id: str
    epoch: int
    assignment: frozenset[TopicPartition] | None  # None: unchanged


class ConsumerGroup:
    """One consumer group. Owned by the coordinator; every method runs on the event loop's thread."""

    def __init__(
        self,
        group_id: str,
        settings: GroupSettings,
        clock: Clock,
        timers: Timers,
        topics: Callable[[], Mapping[str, int]],
        budget: MemberBudget,
        changed: Callable[["ConsumerGroup"], None] = lambda group: None,
        config_of: Callable[[str], GroupConfig] = lambda group_id: DEFAULTS,
    ) -> None:
        self.group_id = group_id
        self.epoch = 0
        self.target_epoch = 0
        self.members: dict[str, ConsumerMember] = {}
        self.target: dict[str, set[TopicPartition]] = {}
        self.touched: set[str] = set()  # ids of members to save again; ConsumerStore clears it
        self.empty_since_ms = clock.now_ms()
        self._changed = changed
        # All topics, name -> number of partitions. The same object until a topic is created, deleted or extended.
        self._topics = topics
        self._seen: tuple[Mapping[str, int], ...] = ()
        self._looked_at: Mapping[str, int] | None = None  # the topics that `_seen` was last compared with
        self._matches = Matches(topics)
        self._instances: dict[str, str] = {}
        self._budget = budget
        self.kept_bytes = 0  # memory of the assignment, see member_budget.py
        self._settings = settings
        self._clock = clock
        self.sessions = Sessions(
            self.members, clock, timers, lambda: config_of(group_id).consumer_session_timeout_ms, self._expired
        )

    @property
    def state(self) -> str:
        """The name that Kafka's tools print."""
        if not self.members:
            return "Empty"
        if self.epoch > self.target_epoch:
            return "Assigning"
        if all(
            member.state is MemberState.STABLE and member.epoch == self.target_epoch for member in self.members.values()
        ):
            return "Stable"
        return "Reconciling"

    @property
    def assignor(self) -> str:
        """The assignor that most members ask for."""
        names = [member.assignor for member in self.members.values() if member.assignor]
        return max(sorted(set(names)), key=names.count) if names else DEFAULT_ASSIGNOR

    @property
    def becomes_classic(self) -> bool:
        """All members speak the classic protocol, and the migration policy allows a downgrade."""
        has_only_classic = bool(self.members) and all(one.classic is not None for one in self.members.values())
        return has_only_classic and self._settings.can_downgrade

    @property
    def seen(self) -> dict[str, int] | None:
        """The topics and partition counts of the target. None: the target must be computed again."""
        return dict(self._seen[0]) if self._seen else None

    def heartbeat(self, beat: Heartbeat) -> Answer:
        check_sizes(beat)
        if beat.assignor is not None and beat.assignor not in ASSIGNORS:
            raise UnsupportedAssignor(f"{beat.assignor!r}; the assignors are {', '.join(sorted(ASSIGNORS))}")
        if beat.pattern:
            compile_pattern(beat.pattern)
        self._check_room(beat, None)
        leaves = beat.epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH)
        answer = self._leave(beat) if leaves else self._beat(beat)
        self._changed(self)
        return answer

    def _beat(self, beat: Heartbeat) -> Answer:
        member = self._join(beat) if beat.epoch == JOIN_EPOCH else self._known(beat)
        before = frozenset(member.assigned)
        self._step(member, beat, None)
        after = frozenset(member.assigned)
        wants_all = beat.epoch == JOIN_EPOCH or beat.topics is not None or beat.owned is not None or member.is_outdated
        member.is_outdated = False
        return Answer(member.member_id, member.epoch, after if wants_all or after != before else None)

    def join_classic(self, beat: Heartbeat, classic: ClassicSide) -> ConsumerMember:
        """Move a classic member one step towards its target; it rejoins for the next step. It must sync within its
        rebalance timeout."""
        check_sizes(beat)
        if sum(len(data) for _, data in classic.protocols) > NAMES_CHARACTERS_MAX:
            raise InvalidInput(f"the protocol metadata exceeds {NAMES_CHARACTERS_MAX} bytes")
        self._check_room(beat, classic)
        member = self._join(beat, speaks_classic=True)
        classic.due = self._clock.monotonic() + beat.rebalance_timeout_ms / 1000
        self._step(member, beat, classic)
        self._changed(self)
        return member

    def _step(self, member: ConsumerMember, beat: Heartbeat, classic: ClassicSide | None) -> None:
        self.touched.add(member.member_id)
        spoke_otherwise, member.classic = (member.classic is None) is not (classic is None), classic
        changed = self._update(member, beat)
        if beat.topics is not None or classic is not None or beat.epoch == JOIN_EPOCH:
            self._weigh(member)
        self.sessions.heard_of(member)
        if spoke_otherwise or classic is not None:
            self.sessions.look_again(member)
        self._retarget(changed)
        self._reconcile(member, beat.owned)

    def check_commit(self, member_id: str, epoch: int) -> None:
        """Raise unless the member may commit offsets now."""
        if epoch < 0 and not self.members:
            return  # a consumer that assigns partitions to itself, under any member id
        if epoch < 0 and not member_id:
            raise UnknownMember("a commit without a member id, but the group has members")
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMember(f"no member {member_id!r} in group {self.group_id!r}")
        if epoch != member.epoch and member.classic is not None:
            raise IllegalGeneration(f"generation {epoch}, but the member is at {member.epoch}")
        if epoch != member.epoch:
            raise StaleMemberEpoch(f"epoch {epoch}, but the member is at {member.epoch}")

    def member(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        """Return the member. Raises if it is unknown, or if the instance id belongs to another member."""
        known = member_id if instance_id is None else self._instances.get(instance_id, "")
        if known not in self.members:
            raise UnknownMember(f"no member {instance_id or member_id!r} in group {self.group_id!r}")
        if known != member_id:
            raise FencedInstance(f"{instance_id!r} is {known!r} now")
        return self.members[known]

    def id_of(self, instance_id: str) -> str | None:
        return self._instances.get(instance_id)

    def remove(self, member_id: str) -> None:
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMember(f"no member {member_id!r} in group {self.group_id!r}")
        self._drop(member)
        self._changed(self)

    # Topics.

    def existing(self, partitions: Iterable[TopicPartition]) -> frozenset[TopicPartition]:
        """The given partitions, without those that no longer exist."""
        topics = self._topics()
        return frozenset((topic, number) for topic, number in partitions if 0 <= number < topics.get(topic, 0))

    def subscribes(self, topic: str) -> bool:
        return any(topic in self._wanted(member) for member in self.members.values())

    def topic_deleted(self, topic: str) -> None:
        """Make sure that members learn of a new topic with the same name: its topic id differs."""
        if all(name != topic for member in self.members.values() for name, _ in member.holds):
            return
        for member in self.members.values():
            member.assigned = {which for which in member.assigned if which[0] != topic}
            member.revoking = {which for which in member.revoking if which[0] != topic}
            member.is_outdated = True
        self._seen = ()
        self.touched.update(self.members)
        self._changed(self)

    def hidden_from(self, member: ConsumerMember) -> frozenset[str]:
        """Topics that the group reads and the member's pattern matches, but that the member may not read."""
        if not member.pattern or member.may_read is None or not self._seen:
            return frozenset()
        matching = self._matches.of(member.pattern)
        return frozenset(topic for topic in self._seen[0] if topic in matching and not member.may_read(topic))

    def restore(
        self,
        epoch: int,
        target_epoch: int,
        seen: Mapping[str, int] | None,
        members: Iterable[tuple[ConsumerMember, set[TopicPartition], frozenset[str]]],
    ) -> None:
        """Restore the group after a restart, each member with its target and its hidden topics. A member has one
        session timeout to send a heartbeat; until then its subscription is unchanged."""
        self.epoch, self.target_epoch = epoch, target_epoch
        self._seen = () if seen is None else (seen,)
        self._budget.keep(self, assigned_bytes(seen or {}))
        for member, target, hidden in members:
            member.is_restored = True
            member.may_read = lambda topic, shown=frozenset(seen or ()) - hidden: topic in shown
            self.members[member.member_id] = member
            self.target[member.member_id] = target
            if member.instance_id is not None:
                self._instances[member.instance_id] = member.member_id
            self._weigh(member)
            self.sessions.restored(member)

    def close(self) -> None:
        for member in self.members.values():
            self.sessions.end(member)
            self._budget.keep(member, 0)
        self._budget.keep(self, 0)

    # Members.

    def _check_room(self, beat: Heartbeat, classic: ClassicSide | None) -> None:
        if beat.topics is None and not beat.pattern and beat.epoch != JOIN_EPOCH:
            return
        before = self.members.get(self._instances.get(beat.instance_id or "", beat.member_id))
        topics, held = (frozenset(), 0) if before is None else (before.topics, before.kept_bytes)
        if beat.topics is not None:
            topics = beat.topics
        if not self._seen:  # the whole target is computed again
            held += self.kept_bytes
        more = assigned_bytes(self._new_topics(beat, topics))
        self._budget.check(more + _member_bytes(beat.member_id, topics, classic) - held)

    def _new_topics(self, beat: Heartbeat, topics: frozenset[str]) -> dict[str, int]:
        """Topics that the group does not read yet, with their partition counts."""
        if beat.pattern:
            topics |= self._matches.readable(beat.pattern, beat.may_read)
        counts, seen = self._topics(), self._seen[0] if self._seen else {}
        return {topic: counts[topic] for topic in topics if topic in counts and topic not in seen}

    def _weigh(self, member: ConsumerMember) -> None:
        self._budget.keep(member, _member_bytes(member.member_id, member.topics, member.classic))

    def _join(self, beat: Heartbeat, *, speaks_classic: bool = False) -> ConsumerMember:
        if beat.topics is None and beat.pattern is None:
            raise InvalidInput("a joining member must send its subscription")
        if beat.owned and not speaks_classic:
            raise InvalidInput("a joining member must not own partitions")
        member = self.members.get(beat.member_id)
        if member is not None and member.instance_id != beat.instance_id:
            raise InvalidInput(
                f"member {beat.member_id!r} has instance id {member.instance_id!r}, not {beat.instance_id!r}"
            )
        if beat.instance_id is not None:
            known = self.members.get(self._instances.get(beat.instance_id, ""))
            # It may rejoin under its own id (lost response, fenced): UNRELEASED_INSTANCE_ID would be fatal for Java.
            if known is not None and known is not member:
                if known.classic is None and not known.away and not speaks_classic:
                    raise UnreleasedInstance(f"instance {beat.instance_id!r} is still member {known.member_id!r}")
                return self._take_over(known, beat)
        if member is None:
            if len(self.members) >= self._settings.members_max:
                raise GroupFull(f"group {self.group_id!r} has {self._settings.members_max} members")
            member = ConsumerMember(beat.member_id or str(uuid.uuid4()), beat.instance_id)
            self.members[member.member_id] = member
            if beat.instance_id is not None:
                self._instances[beat.instance_id] = member.member_id
        if member.away:
            self._rejoined(member)
        return member

    def _take_over(self, known: ConsumerMember, beat: Heartbeat) -> ConsumerMember:
        del self.members[known.member_id]
        self.touched.add(known.member_id)
        target = self.target.pop(known.member_id, set())
        known.member_id = beat.member_id or str(uuid.uuid4())
        self._rejoined(known)
        self.members[known.member_id] = known
        self.target[known.member_id] = target
        assert beat.instance_id is not None
        self._instances[beat.instance_id] = known.member_id
        return known

    def _rejoined(self, member: ConsumerMember) -> None:
        member.away = False
        member.epoch = member.previous_epoch = JOIN_EPOCH  # its epochs from before it left are invalid
        member.revoking, member.state = set(), MemberState.STABLE  # the process that read them is gone

    def _known(self, beat: Heartbeat) -> ConsumerMember:
        if beat.instance_id is not None and self._instances.get(beat.instance_id, beat.member_id) != beat.member_id:
            raise FencedInstance(f"instance {beat.instance_id!r} belongs to another member now")
        member = self.members.get(beat.member_id)
        if member is None or member.away or member.instance_id != (beat.instance_id or member.instance_id):
            raise UnknownMember(f"no member {beat.member_id!r} in group {self.group_id!r}")
        if beat.epoch == member.epoch:
            return member
        # A lost response: the member still sends its previous epoch and owns nothing beyond its assignment.
        lost = beat.epoch == member.previous_epoch and beat.owned is not None and beat.owned <= member.assigned
        if not lost:
            raise FencedMemberEpoch(f"epoch {beat.epoch}, but the member is at {member.epoch}")
        return member

    def _leave(self, beat: Heartbeat) -> Answer:
        member = self.members.get(self._instances.get(beat.instance_id or "", beat.member_id))
        if member is None:
            raise UnknownMember(f"no member {beat.member_id!r} in group {self.group_id!r}")
        if beat.member_id not in ("", member.member_id):
            raise FencedInstance(f"instance {beat.instance_id!r} belongs to another member now")
        if beat.epoch == STATIC_LEAVE_EPOCH and member.instance_id is not None:
            member.away = True  # keeps its place until its session expires
            member.revoking, member.state = set(), MemberState.STABLE  # it has stopped reading them
            self.touched.add(member.member_id)
        else:
            self._drop(member)
        return Answer(member.member_id, beat.epoch, None)

    def _drop(self, member: ConsumerMember) -> None:
        self.sessions.end(member)
        del self.members[member.member_id]
        self._budget.keep(member, 0)
        self.touched.add(member.member_id)
        self.target.pop(member.member_id, None)
        if member.instance_id is not None:
            self._instances.pop(member.instance_id, None)
        if not self.members:
            self.empty_since_ms = self._clock.now_ms()
        if self.becomes_classic:  # their leader will assign, at an epoch that they know already
            self._seen = ()
        else:
            self._retarget(True)

    def _expired(self, member: ConsumerMember) -> None:
        self._drop(member)
        self._changed(self)

    def _update(self, member: ConsumerMember, beat: Heartbeat) -> bool:
        """Update the member; True if the assignment depends on a change."""
        wanted = self._wanted(member) if member.is_restored else None
        before = (member.topics, member.pattern, member.assignor, member.member_id not in self.target)
        if beat.topics is not None:
            member.topics = beat.topics
        if beat.pattern is not None:
            member.pattern = beat.pattern
        if beat.assignor is not None:
            member.assignor = beat.assignor
        if beat.rebalance_timeout_ms > 0:
            member.rebalance_timeout_ms = beat.rebalance_timeout_ms
        if beat.rack_id is not None:
            member.rack_id = beat.rack_id
        member.client_id, member.client_host = beat.client_id, beat.client_host
        if member.may_read != beat.may_read:
            self._looked_at = None
        member.may_read = beat.may_read
        member.is_restored = False
        if wanted is not None and wanted != self._wanted(member):
            return True
        return before != (member.topics, member.pattern, member.assignor, False)

    def _wanted(self, member: ConsumerMember) -> frozenset[str]:
        if not member.pattern:
            return member.topics
        found = self._matches.readable(member.pattern, member.may_read)
        return member.topics | found if member.topics else found

    # Target assignment and reconciliation.

    def _retarget(self, changed: bool) -> None:
        partitions = self._topics()
        if not changed and self._seen and partitions is self._looked_at:
            return
        self._looked_at = partitions
        wanted = {member_id: self._wanted(member) for member_id, member in self.members.items()}
        subscribed = frozenset().union(*wanted.values()) if wanted else frozenset()
        seen = {topic: partitions[topic] for topic in subscribed if topic in partitions}
        if not changed and self._seen == (seen,):
            return
        self._seen = (seen,)
        self._budget.keep(self, assigned_bytes(seen))
        self.epoch += 1
        held = {member_id: self.target.get(member_id, set()) for member_id in self.members}
        self.target = ASSIGNORS[self.assignor](wanted, seen, held)
        self.target_epoch = self.epoch
        self.touched.update(
            member_id
            for member_id, member in self.members.items()
            if member.pattern or self.target[member_id] != held[member_id]
        )

    def _reconcile(self, member: ConsumerMember, owned: Iterable[TopicPartition] | None) -> None:
        """Move the member one step towards its target."""
        if member.state is MemberState.REVOKING:
            if owned is None or member.revoking & set(owned):
                return
            member.revoking = set()
            member.state = MemberState.STABLE
        target = self.target.get(member.member_id, set())
        is_there = member.state is MemberState.STABLE and member.epoch == self.target_epoch
        if is_there and member.assigned == target:
            return
        surplus = member.assigned - target
        member.assigned &= target
        if surplus and (owned is None or surplus & set(owned)):
            member.revoking = surplus
            member.state = MemberState.REVOKING
            self.sessions.start_revoke_timeout(member)
            if member.epoch == 0:
                self._advance(member)
            return
        taken = self._taken(member)
        member.assigned |= target - taken
        member.state = MemberState.WAITING if target & taken else MemberState.STABLE
        self._advance(member)

    def can_take(self, member: ConsumerMember) -> bool:
        """Whether the partitions that the member waits for are free now."""
        target = self.target.get(member.member_id, set())
        return member.state is MemberState.WAITING and not target & self._taken(member)

    def _taken(self, member: ConsumerMember) -> set[TopicPartition]:
        """The partitions that other members hold."""
        taken: set[TopicPartition] = set()
        for other in self.members.values():
            if other is not member:
                taken |= other.holds
        return taken

    def _advance(self, member: ConsumerMember) -> None:
        if member.epoch != self.target_epoch:
            member.previous_epoch, member.epoch = member.epoch, self.target_epoch


def _member_bytes(member_id: str, topics: Iterable[str], classic: ClassicSide | None) -> int:
    return topics_bytes(topics) + classic_bytes(member_id, () if classic is None else classic.protocols)


def check_sizes(beat: Heartbeat) -> None:
    """Bound what a heartbeat may make the broker store."""
    ids = (beat.member_id, beat.instance_id, beat.client_id, beat.client_host, beat.rack_id)
    if any(len(one or "") > ID_CHARACTERS_MAX for one in ids):
        raise InvalidInput(f"an id exceeds {ID_CHARACTERS_MAX} characters")
    if sum(map(len, beat.topics or ())) > NAMES_CHARACTERS_MAX:
        raise InvalidInput(f"the subscription exceeds {NAMES_CHARACTERS_MAX} characters")
