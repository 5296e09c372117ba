"""Until when members of a group of the new protocol may stay: each has a session, and things to do in time.

A member of the new protocol has its rebalance timeout to give up what is not in its target; one of the classic
protocol has it to join again when it is told to, and then to ask for what it was assigned (see mixed.py).
"""

from collections.abc import Callable, Mapping

from headrace.broker.groups.consumer.members import ConsumerMember, MemberState
from headrace.broker.groups.timers import Timers
from headrace.clock import Clock


class Sessions:
    """Those of one group, which owns it. `members` is the group's own table; `over` is told of each that is too late,
    and drops it. What is heard of a member does not touch its timer: that finds out when it goes off."""

    def __init__(
        self,
        members: Mapping[str, ConsumerMember],
        clock: Clock,
        timers: Timers,
        timeout_ms: Callable[[], int],
        over: Callable[[ConsumerMember], None],
    ) -> None:
        self._members = members
        self._clock = clock
        self._timers = timers
        self._timeout_ms = timeout_ms  # of members that speak the new protocol: others say theirs
        self._over = over

    def heard_of(self, member: ConsumerMember) -> None:
        """Its session begins anew."""
        session_s = self._session_s(member)
        member.deadline = self._clock.monotonic() + session_s
        if member.timer is None:
            member.timer = self._timers.call_later(session_s, lambda: self._look_at(member))

    def restored(self, member: ConsumerMember) -> None:
        """After a restart it has all the time again."""
        now = self._clock.monotonic()
        member.deadline = now + self._session_s(member)
        member.revoke_deadline = now + member.rebalance_timeout_ms / 1000
        self._look_at(member)

    def told_to_revoke(self, member: ConsumerMember) -> None:
        member.revoke_deadline = self._clock.monotonic() + member.rebalance_timeout_ms / 1000
        self.look_again(member)

    def told_to_join(self, member: ConsumerMember) -> None:
        """One that speaks the classic protocol. To be told once more gives it no more time."""
        assert member.classic is not None
        if member.classic.due is None:
            member.classic.due = self._clock.monotonic() + member.rebalance_timeout_ms / 1000
            self.look_again(member)

    def look_again(self, member: ConsumerMember) -> None:
        """There is something that it has to do earlier than the timer knows."""
        self.end(member)
        self._look_at(member)

    def end(self, member: ConsumerMember) -> None:
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None

    def _session_s(self, member: ConsumerMember) -> float:
        return (self._timeout_ms() if member.classic is None else member.classic.session_timeout_ms) / 1000

    def _look_at(self, member: ConsumerMember) -> None:
        member.timer = None
        if self._members.get(member.member_id) is not member:
            return
        deadline = member.deadline
        if member.classic is not None:
            deadline = min(deadline, deadline if member.classic.due is None else member.classic.due)
        elif member.state is MemberState.REVOKING:  # alive, but in the way of others for too long
            deadline = min(deadline, member.revoke_deadline)
        left_s = deadline - self._clock.monotonic()
        if left_s > 0:
            member.timer = self._timers.call_later(left_s, lambda: self._look_at(member))
        else:
            self._over(member)
