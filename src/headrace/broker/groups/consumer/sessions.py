"""Session and rebalance timeouts of the members of a consumer group.

A member of the consumer protocol must revoke partitions within its rebalance timeout. A classic member must rejoin
within it when asked to, and then sync (see classic_members.py).
"""

from collections.abc import Callable, Mapping

from headrace.broker.groups.consumer.members import ConsumerMember, MemberState
from headrace.broker.groups.timers import Timers
from headrace.clock import Clock


class Sessions:
    """The sessions of one group. `members` is the group's own table; `expired` is called for each member that is too
    late, and drops it. A heartbeat does not touch the member's timer: the timer checks the deadline when it fires."""

    def __init__(
        self,
        members: Mapping[str, ConsumerMember],
        clock: Clock,
        timers: Timers,
        timeout_ms: Callable[[], int],
        expired: Callable[[ConsumerMember], None],
    ) -> None:
        self._members = members
        self._clock = clock
        self._timers = timers
        self._timeout_ms = timeout_ms  # for the consumer protocol; classic members send their own
        self._expired = expired

    def heard_of(self, member: ConsumerMember) -> None:
        """Renew the member's session."""
        session_s = self._session_s(member)
        member.deadline = self._clock.monotonic() + session_s
        if member.timer is None:
            member.timer = self._timers.call_later(session_s, lambda: self._look_at(member))

    def restored(self, member: ConsumerMember) -> None:
        """After a restart, every timeout starts over."""
        now = self._clock.monotonic()
        member.deadline = now + self._session_s(member)
        member.revoke_deadline = now + member.rebalance_timeout_ms / 1000
        self._look_at(member)

    def start_revoke_timeout(self, member: ConsumerMember) -> None:
        member.revoke_deadline = self._clock.monotonic() + member.rebalance_timeout_ms / 1000
        self.look_again(member)

    def start_rejoin_timeout(self, member: ConsumerMember) -> None:
        """Ask a classic member to rejoin. Asking again does not extend its deadline."""
        assert member.classic is not None
        if member.classic.due is None:
            member.classic.due = self._clock.monotonic() + member.rebalance_timeout_ms / 1000
            self.look_again(member)

    def look_again(self, member: ConsumerMember) -> None:
        """Reset the timer after a deadline became earlier."""
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
        elif member.state is MemberState.REVOKING:  # alive, but blocking other members
            deadline = min(deadline, member.revoke_deadline)
        left_s = deadline - self._clock.monotonic()
        if left_s > 0:
            member.timer = self._timers.call_later(left_s, lambda: self._look_at(member))
        else:
            self._expired(member)
