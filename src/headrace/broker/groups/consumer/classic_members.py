"""Online migration between the two group protocols: members restart one by one while the others keep reading.

The first member of the consumer protocol converts a classic group into a consumer group, which hosts the classic
members: they keep their partitions and continue with the requests that they know. Their generation is their member
epoch; when they have to revoke or take partitions, a heartbeat asks them to rejoin. When the last member of the
consumer protocol leaves, the group becomes classic again. The migration policy can forbid either direction, as in
Kafka: then the new member is refused, or the group stays as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from headrace.broker.groups.assign import TopicPartition
from headrace.broker.groups.classic.consumer_protocol import (
    CONSUMER,
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
)
from headrace.broker.groups.classic.group import ClassicGroup
from headrace.broker.groups.classic.members import Join, JoinAnswer, JoinResult, Member, SyncAnswer, Synced, names_of
from headrace.broker.groups.classic.roster import new_id
from headrace.broker.groups.consumer.group import JOIN_EPOCH, ConsumerGroup, Heartbeat
from headrace.broker.groups.consumer.members import ClassicSide, ConsumerMember, MemberState
from headrace.broker.groups.offsets import Answer
from headrace.broker.groups.settings import GroupSettings
from headrace.errors import (
    GroupStaysClassic,
    HeadraceError,
    IllegalGeneration,
    InconsistentProtocol,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownMember,
)

# The user data of these assignors can be dropped: members do not need it (librdkafka merely returns it).
PLAIN_ASSIGNORS = frozenset({"range", "roundrobin", "sticky", "cooperative-sticky"})


def host(classic: ClassicGroup, group: ConsumerGroup, settings: GroupSettings) -> None:
    """Copy the members of a classic group into a new consumer group. Raises if they cannot be hosted."""
    if not settings.can_upgrade:
        raise GroupStaysClassic(classic.group_id, "kafka_migration_policy forbids the upgrade")
    if classic.protocol_type != CONSUMER:
        raise GroupStaysClassic(classic.group_id, f"its protocol type is {classic.protocol_type!r}")
    try:
        members = [_hosted(classic, one, group) for one in classic.members.values()]
    except InconsistentProtocol as error:
        raise GroupStaysClassic(classic.group_id, str(error)) from error
    group.restore(
        classic.generation,
        classic.generation,
        None,
        ((member, set(member.assigned), frozenset()) for member in members),
    )
    group.touched.update(group.members)


def _hosted(classic: ClassicGroup, one: Member, group: ConsumerGroup) -> ConsumerMember:
    subscription = decode_subscription(one.protocols[0][1])  # the subscription that counts from now on
    if one.supports(classic.protocol):  # no protocol is chosen before the first rebalance ends
        subscription = decode_subscription(one.metadata(classic.protocol))
    assigned = decode_assignment(one.assignment)
    if assigned.user_data and classic.protocol not in PLAIN_ASSIGNORS:
        raise InconsistentProtocol(f"the assignor {classic.protocol!r} attaches user data to assignments")
    held = assigned.partitions | subscription.owned  # it may still hold partitions that are no longer assigned to it
    at = one.generation or classic.generation
    return ConsumerMember(
        one.member_id,
        one.instance_id,
        client_id=one.client_id,
        client_host=one.client_host,
        rack_id=subscription.rack_id,
        rebalance_timeout_ms=one.rebalance_timeout_ms,
        topics=subscription.topics,
        epoch=at,
        previous_epoch=at,
        assigned=set(group.existing(held)),
        classic=ClassicSide(one.session_timeout_ms, one.protocols),
    )


def left_behind(group: ConsumerGroup) -> Iterator[Member]:
    """The members of a consumer group with only classic ones, for the classic group that replaces it."""
    for one in group.members.values():
        assert one.classic is not None
        yield Member(
            member_id=one.member_id,
            instance_id=one.instance_id,
            client_id=one.client_id,
            client_host=one.client_host,
            session_timeout_ms=one.classic.session_timeout_ms,
            rebalance_timeout_ms=one.rebalance_timeout_ms,
            protocols=one.classic.protocols,
            assignment=_encode(one.classic, one.holds),
            generation=one.epoch,
        )


def _encode(classic: ClassicSide, partitions: set[TopicPartition]) -> bytes:
    return encode_assignment(partitions, decode_subscription(classic.protocols[0][1]).version)


class ClassicMembers:
    """A consumer group as its classic members see it: the same requests as ClassicGroup.

    `when_kept` calls back once the group's state is durable; `successor` returns the classic group that has replaced
    this one, if any.
    """

    def __init__(
        self,
        group: ConsumerGroup,
        settings: GroupSettings,
        when_kept: Callable[[Answer], None],
        successor: Callable[[], ClassicGroup | None],
    ) -> None:
        self.members: Mapping[str, ConsumerMember] = group.members
        self._group = group
        self._settings = settings
        self._when_kept = when_kept
        self._successor = successor

    def join(self, join: Join, answer: JoinAnswer) -> None:
        try:
            member = self._admit(join)
        except HeadraceError as error:
            answer(error)
            return
        classic = self._successor()
        if classic is not None:  # it replaced the last member of the consumer protocol
            classic.join(replace(join, member_id=member.member_id), answer)
            return
        joined = JoinResult(member.epoch, CONSUMER, join.protocols[0][0], "", member.member_id)
        self._when_kept(lambda error: answer(joined if error is None else error))

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
        """Answer with the broker's assignment; the member's own is ignored."""
        try:
            member, classic = self._member(member_id, instance_id, generation)
            chosen = classic.protocols[0][0]
            if protocol_type not in (None, CONSUMER) or protocol not in (None, chosen):
                raise InconsistentProtocol(f"member {member_id!r} uses {chosen!r}")
            is_behind = member.epoch < self._group.epoch and member.state is not MemberState.REVOKING
            self._heard_of(member, is_behind=is_behind)
        except HeadraceError as error:
            answer(error)
            return
        classic.due = None
        synced = Synced(CONSUMER, chosen, _encode(classic, member.assigned))
        self._when_kept(lambda error: answer(synced if error is None else error))

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> None:
        member, _ = self._member(member_id, instance_id, generation)
        is_behind = (
            member.epoch < self._group.epoch or member.state is MemberState.REVOKING or self._group.can_take(member)
        )
        self._heard_of(member, is_behind=is_behind)

    def leave(self, member_id: str, instance_id: str | None) -> str:
        """Remove a member and return its id."""
        if instance_id is not None and not member_id:
            member_id = self._group.id_of(instance_id) or ""
        self._group.remove(self._group.member(member_id, instance_id).member_id)
        return member_id

    def _member(self, member_id: str, instance_id: str | None, generation: int) -> tuple[ConsumerMember, ClassicSide]:
        member = self._group.member(member_id, instance_id)
        if member.classic is None:
            raise UnknownMember(f"member {member_id!r} uses the consumer protocol")
        if generation != member.epoch:
            raise IllegalGeneration(f"generation {generation}, but the member is at {member.epoch}")
        return member, member.classic

    def _heard_of(self, member: ConsumerMember, *, is_behind: bool) -> None:
        """Renew the session; a member that is behind must rejoin within its rebalance timeout."""
        self._group.sessions.heard_of(member)
        if is_behind:
            self._group.sessions.start_rejoin_timeout(member)
            raise RebalanceInProgress(self._group.group_id)

    def _admit(self, join: Join) -> ConsumerMember:
        self._settings.check_session_timeout(join.session_timeout_ms)
        subscription = self._check_protocols(join)
        member_id = join.member_id
        if join.instance_id is not None and member_id:
            self._group.member(member_id, join.instance_id)
        if not member_id:
            member_id = new_id(join.instance_id or join.client_id or "member")
            if join.id_required and join.instance_id is None:
                raise MemberIdRequired(member_id)
        beat = Heartbeat(
            member_id=member_id,
            epoch=JOIN_EPOCH,
            instance_id=join.instance_id,
            client_id=join.client_id,
            client_host=join.client_host,
            rack_id=subscription.rack_id,
            rebalance_timeout_ms=join.rebalance_timeout_ms,
            topics=subscription.topics,
            pattern="",
            owned=self._group.existing(subscription.owned),
        )
        return self._group.join_classic(beat, ClassicSide(join.session_timeout_ms, join.protocols))

    def _check_protocols(self, join: Join) -> Subscription:
        """Classic members may become a classic group again, so they must have a protocol in common."""
        if join.protocol_type != CONSUMER or not join.protocols:
            raise InconsistentProtocol(f"the group has protocol type {CONSUMER!r}, not {join.protocol_type!r}")
        own = {join.member_id, self._group.id_of(join.instance_id) if join.instance_id is not None else None}
        common = join.names
        for one in self.members.values():
            if one.classic and one.member_id not in own:
                common &= names_of(one.classic.protocols)
        if not common:
            raise InconsistentProtocol("the classic members have no protocol in common")
        return decode_subscription(join.protocols[0][1])
