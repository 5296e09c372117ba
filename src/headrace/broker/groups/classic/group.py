"""A group of the classic protocol: its state machine, rebalances and sessions.

    EMPTY ──join──► PREPARING ──all members joined, or timeout──► COMPLETING ──leader syncs──► STABLE
                        ▲                                               │                          │
                        └────────── a member joins, leaves or changes ──┴──────────────────────────┘

The table MOVES is this diagram; only _move changes the state. Responses are callbacks: a join or sync is answered when
the group reaches the state it needs, at once or after a rebalance.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from headrace.broker.groups.classic.members import (
    GroupState,
    Join,
    JoinAnswer,
    JoinResult,
    Member,
    Protocols,
    SyncAnswer,
    Synced,
)
from headrace.broker.groups.classic.roster import Roster
from headrace.broker.groups.member_budget import MemberBudget
from headrace.broker.groups.settings import GroupSettings
from headrace.broker.groups.timers import Timer, Timers
from headrace.clock import Clock
from headrace.errors import (
    FencedInstance,
    HeadraceError,
    IllegalGeneration,
    InconsistentProtocol,
    RebalanceInProgress,
    UnknownMember,
)

EMPTY, PREPARING, COMPLETING, STABLE, DEAD = GroupState
ABSENT_CHECK_S_MIN = 1.0

MOVES: frozenset[tuple[GroupState, GroupState]] = frozenset(
    {
        (EMPTY, PREPARING),
        (STABLE, PREPARING),
        (COMPLETING, PREPARING),
        (PREPARING, COMPLETING),
        (PREPARING, EMPTY),
        (COMPLETING, STABLE),
        (EMPTY, DEAD),
        (PREPARING, DEAD),
    }
)


class ClassicGroup:
    """One classic group. Owned by the coordinator; every method runs on the event loop's thread."""

    def __init__(
        self,
        group_id: str,
        settings: GroupSettings,
        clock: Clock,
        timers: Timers,
        budget: MemberBudget,
        changed: Callable[["ClassicGroup"], None] = lambda group: None,
    ) -> None:
        self.group_id = group_id
        self.state = EMPTY
        self.generation = 0
        self.protocol = ""
        self.leader = ""
        self.empty_since_ms = clock.now_ms()
        self._roster = Roster(
            group_id, settings, timers, budget, on_replaced=self._replaced, on_forgotten=self._maybe_complete_join
        )
        self.members: Mapping[str, Member] = self._roster.members
        self._settings = settings
        self._clock = clock
        self._timers = timers
        self._changed = changed
        self._joined_count = 0
        self._rebalance_timer: Timer | None = None
        self._initial_deadline = 0.0

    @property
    def protocol_type(self) -> str:
        return self._roster.protocol_type

    @protocol_type.setter
    def protocol_type(self, kind: str) -> None:
        self._roster.protocol_type = kind

    @property
    def is_in_use(self) -> bool:
        """The group has members, or has given out a member id that may still join."""
        return bool(self.members) or self._roster.is_expecting

    # Requests of members.

    def join(self, join: Join, answer: JoinAnswer) -> None:
        """Call `answer` once, now or when the next generation begins."""
        leader = self.leader
        came_back = (
            not join.member_id and join.instance_id is not None and self._roster.id_of(join.instance_id) is not None
        )
        try:
            member = self._roster.admit(join)
        except HeadraceError as error:
            answer(error)
            return
        before = member.protocols
        self._roster.change_protocols(member, join.protocols)
        member.session_timeout_ms, member.rebalance_timeout_ms = (
            join.session_timeout_ms,
            join.rebalance_timeout_ms,
        )
        member.client_id, member.client_host = join.client_id, join.client_host
        self._keep_alive(member)
        if came_back:
            self._changed(self)
        if self._may_keep_generation(member, before, came_back=came_back):
            # The member must not assign. The response says so, or, for old versions, names another leader.
            answer(self._joined(member, self.leader if join.can_skip_assignment else leader))
            return
        member.answer_join(RebalanceInProgress("the same member joined again"))
        member.join_answer = answer
        self._set_joined(member, True)
        if self.state is not PREPARING:
            self._begin_rebalance()
        self._maybe_complete_join()

    def sync(
        self,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol_type: str | None,
        protocol: str | None,
        assignments: Mapping[str, bytes],
        answer: SyncAnswer,
    ) -> None:
        try:
            member = self._check(member_id, instance_id, generation)
            if self.state is PREPARING:  # adopted members may sync here, before a protocol is chosen
                raise RebalanceInProgress(self.group_id)
            if protocol_type not in (None, self.protocol_type) or protocol not in (None, self.protocol):
                raise InconsistentProtocol(f"group {self.group_id!r} uses {self.protocol!r}")
            if member_id == self.leader and self.state is COMPLETING:
                self._roster.check_assignments(assignments)
        except HeadraceError as error:
            answer(error)
            return
        self._keep_alive(member)
        if self.state is STABLE:
            answer(Synced(self.protocol_type, self.protocol, member.assignment))
            return
        member.answer_sync(RebalanceInProgress("the same member synced again"))
        member.sync_answer = answer
        if member_id == self.leader:
            self._assigned(assignments)

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> None:
        member = self._check(member_id, instance_id, generation)
        self._keep_alive(member)
        if self.state is PREPARING:
            raise RebalanceInProgress(self.group_id)

    def leave(self, member_id: str, instance_id: str | None) -> str:
        """Remove a member and return its id."""
        if instance_id is not None:
            known = self._roster.id_of(instance_id)
            if known is None:
                raise UnknownMember(f"no static member {instance_id!r} in group {self.group_id!r}")
            if member_id not in ("", known):
                raise FencedInstance(f"{instance_id!r} is {known!r} now")
            member_id = known
        elif self._roster.forget_expected(member_id):
            self._maybe_complete_join()
            return member_id
        self._remove(self._roster.member(member_id))
        return member_id

    def check_commit(
        self, member_id: str, instance_id: str | None, generation: int, *, transactional: bool = False
    ) -> None:
        """Raise unless the member may commit offsets now."""
        if generation < 0 and not self.members:
            return  # a consumer that assigns partitions to itself, under any member id
        if generation < 0 and not member_id:
            raise UnknownMember("a commit without a member id, but the group has members")
        member = self._check(member_id, instance_id, generation)
        if self.state is COMPLETING and not transactional:
            raise RebalanceInProgress(self.group_id)
        self._keep_alive(member)

    def close(self, why: HeadraceError | None = None) -> None:
        """Cancel every timer and answer every waiting request."""
        self._roster.close()
        self._stop_rebalance_timer()
        for member in self.members.values():
            self._stop(member, why or UnknownMember("the broker is stopping"))

    def release_memory(self) -> None:
        """Stop accounting for the members: a consumer group is about to host and count them."""
        self._roster.release_memory()

    def reclaim_memory(self) -> None:
        """Account for the members again, after the consumer group refused them."""
        self._roster.reclaim_memory()

    # Membership.

    def _replaced(self, member: Member, old_id: str) -> None:
        """A restarted static member has taken its old place."""
        self._stop(member, FencedInstance(f"{member.instance_id!r} joined again"))
        if self.leader == old_id:
            self.leader = member.member_id

    def _check(self, member_id: str, instance_id: str | None, generation: int) -> Member:
        self._roster.check_instance(member_id, instance_id)
        member = self._roster.member(member_id)
        # Adopted members keep their own generations until they have joined again.
        current = member.generation if self.state is PREPARING and member.generation else self.generation
        if generation != current:
            raise IllegalGeneration(f"generation {generation}, but the group is at {current}")
        return member

    def _remove(self, member: Member) -> None:
        self._roster.remove(member)
        self._stop(member, UnknownMember(f"member {member.member_id!r} was removed"))
        if self.leader == member.member_id:
            self.leader = ""
        if self.state in (STABLE, COMPLETING):
            self._begin_rebalance()
        self._maybe_complete_join()

    def _stop(self, member: Member, why: HeadraceError) -> None:
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        self._set_joined(member, False)
        member.answer_join(why)
        member.answer_sync(why)

    def restore(self, member: Member) -> None:
        """Restore a member after a restart: it has one session timeout to send a heartbeat."""
        self._roster.restore(member)
        member.generation = self.generation
        self.state = STABLE
        self._keep_alive(member)

    def adopt(self, protocol_type: str, generation: int, members: Iterable[Member]) -> None:
        """Take over the members of a former consumer group, each with its own generation; all of them join again."""
        self.protocol_type, self.generation = protocol_type, generation
        for member in members:
            self._roster.restore(member)
            self._keep_alive(member)
        self.state = STABLE
        self._begin_rebalance()

    def _set_joined(self, member: Member, joined: bool) -> None:
        self._joined_count += joined - member.joined
        member.joined = joined

    # Sessions: a heartbeat moves the deadline; the timer checks the deadline when it fires.

    def _keep_alive(self, member: Member) -> None:
        session_s = member.session_timeout_ms / 1000
        member.deadline = self._clock.monotonic() + session_s
        if member.timer is None:
            member.timer = self._timers.call_later(session_s, lambda: self._session_over(member))

    def _session_over(self, member: Member) -> None:
        member.timer = None
        if self.members.get(member.member_id) is not member:
            return
        left_s = member.deadline - self._clock.monotonic()
        waits = member.join_answer is not None or member.sync_answer is not None  # the member waits for us
        if left_s > 0 or waits:
            again_s = left_s if left_s > 0 else member.session_timeout_ms / 1000
            member.timer = self._timers.call_later(again_s, lambda: self._session_over(member))
            return
        self._remove(member)

    # Generations.

    def _move(self, state: GroupState) -> None:
        assert (self.state, state) in MOVES, f"{self.state} to {state}"
        self.state = state

    def _may_keep_generation(self, member: Member, before: Protocols, *, came_back: bool) -> bool:
        """Whether a join changes nothing: its last response was lost, or a static member returned."""
        if member.generation != self.generation:
            return False
        if came_back:  # not before the leader has assigned, because it assigns to the old member id
            return self.state is STABLE and self._vote() == self.protocol
        if member.protocols != before:
            return False
        # A leader also rejoins when its topics have changed, which its metadata does not show.
        return self.state is COMPLETING or (self.state is STABLE and member.member_id != self.leader)

    def _begin_rebalance(self) -> None:
        for member in self.members.values():
            member.answer_sync(RebalanceInProgress(self.group_id))
        first = self.state is EMPTY
        self._move(PREPARING)
        self._stop_rebalance_timer()
        delay_s = self._settings.initial_rebalance_delay_ms / 1000 if first else 0.0
        self._initial_deadline = self._clock.monotonic() + delay_s
        wait_s = delay_s or self._rebalance_timeout_s()
        self._rebalance_timer = self._timers.call_later(wait_s, self._join_timed_out)

    def _rebalance_timeout_s(self) -> float:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0) / 1000

    def _stop_rebalance_timer(self) -> None:
        if self._rebalance_timer is not None:
            self._rebalance_timer.cancel()
            self._rebalance_timer = None

    def _maybe_complete_join(self) -> None:
        if self.state is not PREPARING or self._clock.monotonic() < self._initial_deadline:
            return
        if not self._roster.is_expecting and self._joined_count == len(self.members):
            self._complete_join()

    def _join_timed_out(self) -> None:
        self._rebalance_timer = None
        if self.state is not PREPARING:
            return
        for member in [one for one in self.members.values() if not one.joined and one.instance_id is None]:
            self._roster.remove(member)
            self._stop(member, UnknownMember("did not join in time"))
        if self.members and not any(member.joined for member in self.members.values()):
            # Only absent static members are left: wait until their sessions expire.
            wait_s = max(self._rebalance_timeout_s(), ABSENT_CHECK_S_MIN)
            self._rebalance_timer = self._timers.call_later(wait_s, self._join_timed_out)
            return
        self._complete_join()

    def _complete_join(self) -> None:
        self._stop_rebalance_timer()
        self.generation += 1
        if not self.members:
            self._move(EMPTY)
            self.protocol = self.leader = ""
            self.empty_since_ms = self._clock.now_ms()
            self._changed(self)
            return
        self._move(COMPLETING)
        leader = self.members.get(self.leader)
        if leader is None or not leader.joined:
            self.leader = next(member.member_id for member in self.members.values() if member.joined)
        self.protocol = self._vote()
        for member in self.members.values():
            member.generation = self.generation
            if member.joined:
                self._keep_alive(member)
            member.answer_join(self._joined(member, self.leader))
            self._set_joined(member, False)
        self._rebalance_timer = self._timers.call_later(self._rebalance_timeout_s(), self._sync_timed_out)

    def _vote(self) -> str:
        """Each member votes for its first protocol among the common ones; the leader's order breaks ties."""
        leader = self.members[self.leader]
        common = {name: None for name, _ in leader.protocols if self._roster.is_spoken_by_all(name)}
        assert common, "admitted members share a protocol"
        members = self.members.values()
        votes = Counter(next(name for name, _ in member.protocols if name in common) for member in members)
        return max(common, key=lambda name: votes[name])

    def _joined(self, member: Member, leader: str) -> JoinResult:
        leads = member.member_id == leader
        return JoinResult(
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            leader=leader,
            member_id=member.member_id,
            members=tuple(
                (one.member_id, one.instance_id, one.metadata(self.protocol)) for one in self.members.values()
            )
            if leads
            else (),
            skip_assignment=leads and self.state is STABLE,
        )

    def _assigned(self, assignments: Mapping[str, bytes]) -> None:
        self._stop_rebalance_timer()
        self._move(STABLE)
        for member in self.members.values():
            self._roster.assign(member, assignments.get(member.member_id, b""))
            member.answer_sync(Synced(self.protocol_type, self.protocol, member.assignment))
        self._changed(self)

    def _sync_timed_out(self) -> None:
        """Remove members that joined but never synced; without a sync of the leader there is no assignment."""
        self._rebalance_timer = None
        if self.state is not COMPLETING:
            return
        for member in [one for one in self.members.values() if one.sync_answer is None]:
            if self.members.get(member.member_id) is member:
                self._remove(member)
