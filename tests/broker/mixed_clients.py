"""Consumers of both group protocols that do what the real ones do, one request at a time."""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import pytest

from headrace.broker.groups.assign import Assignment, TopicPartition, assign_range, assign_uniform
from headrace.broker.groups.classic.consumer_protocol import decode_assignment, decode_subscription, encode_assignment
from headrace.broker.groups.classic.group import ClassicGroup
from headrace.broker.groups.classic.members import JoinResult, Synced
from headrace.broker.groups.consumer.group import ConsumerGroup, Heartbeat
from headrace.errors import (
    FencedInstance,
    HeadraceError,
    IllegalGeneration,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownMember,
    UnreleasedInstance,
)
from tests.broker.group_world import Answer, World

GROUP = "g"
PARTITIONS = 6
BOTH = pytest.mark.parametrize("cooperative", [False, True])
Owned = frozenset[TopicPartition]


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def subscription(topics: Iterable[str] = ("t",), owned: Iterable[TopicPartition] = (), version: int = 1) -> bytes:
    names = sorted(topics)
    out = struct.pack(">hi", version, len(names)) + b"".join(map(text, names)) + struct.pack(">i", -1)
    if version >= 1:
        out += encode_assignment(owned, 0)[2:-4]
    if version >= 2:
        out += struct.pack(">i", -1)
    return out + text("rack") if version >= 3 else out


class GroupClient(ABC):
    """What the consumers of both protocols have."""

    member_id: str
    owned: Owned

    @abstractmethod
    def step(self) -> None:
        """Send one request."""


class ClassicClient(GroupClient):
    """Eager: it gives up everything before it joins. Cooperative: it says what it owns, and gives up what it must."""

    def __init__(
        self, world: World, *, cooperative: bool = False, instance_id: str | None = None, **values: Any
    ) -> None:
        self.world = world
        self.is_cooperative = cooperative
        self.instance_id = instance_id
        self.member_id = ""
        self.generation = -1
        self.owned = frozenset()
        self.wants_join = True
        self.values = values
        self._joining: Answer[JoinResult] | None = None
        self._syncing: Answer[Synced] | None = None

    @property
    def protocol(self) -> str:
        return "cooperative-sticky" if self.is_cooperative else "range"

    def step(self) -> None:
        try:
            if self._joining is not None:
                self._joined()
            elif self._syncing is not None:
                self._synced()
            elif self.wants_join:
                self._join()
            else:
                self.beat()
        except RebalanceInProgress:
            self._again()
        except MemberIdRequired as error:
            self._again()
            self.member_id = error.member_id
        except (IllegalGeneration, UnknownMember, FencedInstance) as error:
            self._again()
            self.owned = frozenset()
            if isinstance(error, UnknownMember):
                self.member_id = ""

    def _again(self) -> None:
        self.wants_join, self._joining, self._syncing = True, None, None

    def beat(self) -> None:
        group = self.world.groups.known_classic(GROUP)
        group.heartbeat(self.member_id, self.instance_id, self.generation)

    def commit(self) -> None:
        self.world.groups.check_commit(GROUP, self.member_id, self.instance_id, self.generation)

    def _join(self) -> None:
        if not self.is_cooperative:
            self.owned = frozenset()
        values: dict[str, Any] = {
            "instance_id": self.instance_id,
            "protocols": ((self.protocol, subscription(owned=self.owned, version=int(self.is_cooperative))),),
            "id_required": self.instance_id is None,
            **self.values,
        }
        self._joining = self.world.join(GROUP, self.member_id, **values)
        self._joined()

    def _joined(self) -> None:
        assert self._joining is not None
        if self._joining.waiting:
            return
        joined, self._joining = self._joining.result, None
        self.member_id, self.generation, self.wants_join = joined.member_id, joined.generation, False
        assignments = self._assign(joined) if joined.leader == self.member_id else {}
        self._syncing = Answer()
        self.world.groups.known_classic(GROUP).sync(
            self.member_id, self.instance_id, joined.generation, "consumer", joined.protocol, assignments, self._syncing
        )
        self._synced()

    def _synced(self) -> None:
        assert self._syncing is not None
        if self._syncing.waiting:
            return
        assigned, self._syncing = decode_assignment(self._syncing.result.assignment).partitions, None
        self.wants_join = self.is_cooperative and bool(
            self.owned - assigned
        )  # it revoked partitions for another member
        self.owned = assigned

    def _assign(self, joined: JoinResult) -> dict[str, bytes]:
        said = {member_id: decode_subscription(metadata) for member_id, _, metadata in joined.members}
        topics = {member_id: one.topics for member_id, one in said.items()}
        held = {member_id: set(one.owned) for member_id, one in said.items()}
        found: Assignment
        if self.is_cooperative:
            found = assign_uniform(topics, self.world.topics, held)
            taken = {which: member_id for member_id, partitions in held.items() for which in partitions}
            found = {
                member_id: {which for which in partitions if taken.get(which, member_id) == member_id}
                for member_id, partitions in found.items()
            }
        else:
            found = assign_range(topics, self.world.topics, held)
        return {member_id: encode_assignment(partitions, 0) for member_id, partitions in found.items()}

    def stop(self) -> None:
        """As clients do: one with an instance id does not leave, it means to be back."""
        self.owned = frozenset()
        if self.instance_id is None and self.member_id:
            try:
                self.world.groups.known_classic(GROUP).leave(self.member_id, None)
            except HeadraceError:
                pass  # it was not in the group


class NewClient(GroupClient):
    """Of the new protocol."""

    def __init__(self, world: World, name: str, *, instance_id: str | None = None, **values: Any) -> None:
        self.world = world
        self.member_id = name
        self.instance_id = instance_id
        self.epoch = 0
        self.owned = frozenset()
        self.values = {"topics": frozenset({"t"}), "rebalance_timeout_ms": 30_000, **values}

    def step(self) -> None:
        try:
            self.beat()
        except (UnknownMember, UnreleasedInstance):  # the second while one that crashed holds its place
            self.epoch, self.owned = 0, frozenset()

    def beat(self) -> None:
        values = self.values if self.epoch == 0 else {}
        told = self.world.groups.heartbeat(
            GROUP,
            Heartbeat(
                member_id=self.member_id, epoch=self.epoch, instance_id=self.instance_id, owned=self.owned, **values
            ),
        )
        self.epoch = told.epoch
        if told.assignment is not None:
            self.owned = told.assignment

    def commit(self) -> None:
        self.world.groups.check_commit(GROUP, self.member_id, self.instance_id, self.epoch)

    def stop(self) -> None:
        self.owned = frozenset()
        epoch = -1 if self.instance_id is None else -2
        try:
            self.world.groups.heartbeat(
                GROUP, Heartbeat(member_id=self.member_id, epoch=epoch, instance_id=self.instance_id)
            )
        except HeadraceError:
            pass  # it was not in the group


AnyClient = ClassicClient | NewClient


def join_again(client: AnyClient) -> None:
    """Only clients of the classic protocol join."""
    if isinstance(client, ClassicClient):
        client.wants_join = True


def check_owners(clients: Iterable[AnyClient]) -> None:
    held = [which for one in clients for which in one.owned]
    assert len(held) == len(set(held)), "no partition has two owners at any step"


def settle(*clients: AnyClient, rounds: int = 20) -> None:
    for _ in range(rounds):
        for one in clients:
            one.step()
            check_owners(clients)


def classic_pair(world: World, *, cooperative: bool = False, **values: Any) -> list[ClassicClient]:
    pair = [ClassicClient(world, cooperative=cooperative, **values) for _ in range(2)]
    settle(*pair)
    assert [len(one.owned) for one in pair] == [3, 3]
    return pair


def mixed(world: World, *, cooperative: bool = False) -> tuple[list[ClassicClient], NewClient]:
    pair, new = classic_pair(world, cooperative=cooperative), NewClient(world, "n")
    settle(*pair, new)
    return pair, new


def group_of(world: World) -> ConsumerGroup:
    group = world.groups.find(GROUP)
    assert isinstance(group, ConsumerGroup)
    return group


def classic_of(world: World) -> ClassicGroup:
    group = world.groups.find(GROUP)
    assert isinstance(group, ClassicGroup)
    return group


def refused_sync(world: World, one: ClassicClient, **values: Any) -> Any:
    said: list[Any] = []
    asked = {"generation": one.generation, "protocol_type": "consumer", "protocol": one.protocol, **values}
    world.groups.known_classic(GROUP).sync(one.member_id, None, assignments={}, answer=said.append, **asked)
    return said[0]
