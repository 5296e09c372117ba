"""Assignors: pure, deterministic functions from subscriptions to assignments.

`held` is the present assignment. The uniform assignor moves as few partitions as balance allows; range ignores it.
"""

from bisect import insort
from collections.abc import Callable, Mapping

TopicPartition = tuple[str, int]
Assignment = dict[str, set[TopicPartition]]
Subscriptions = Mapping[str, frozenset[str]]  # member to topics
Assignor = Callable[[Subscriptions, Mapping[str, int], Mapping[str, set[TopicPartition]]], Assignment]


def assign_range(
    subscriptions: Subscriptions, partitions: Mapping[str, int], held: Mapping[str, set[TopicPartition]]
) -> Assignment:
    """Per topic, in order of member id: equal ranges of adjacent partitions. Topics with the same keys and the same
    number of partitions are thus co-partitioned."""
    result: Assignment = {member: set() for member in subscriptions}
    for topic, readers in sorted(_readers(subscriptions, partitions).items()):
        if not readers:
            continue
        each, rest = divmod(partitions[topic], len(readers))
        start = 0
        for index, member in enumerate(readers):
            end = start + each + (index < rest)
            result[member].update((topic, number) for number in range(start, end))
            start = end
    return result


def assign_uniform(
    subscriptions: Subscriptions, partitions: Mapping[str, int], held: Mapping[str, set[TopicPartition]]
) -> Assignment:
    """As balanced as the subscriptions allow, with as few moves as possible."""
    result: Assignment = {member: set() for member in subscriptions}
    everything = [(topic, number) for topic in sorted(partitions) for number in range(partitions[topic])]
    owner: dict[TopicPartition, str] = {}
    for member in sorted(subscriptions):
        for which in sorted(held.get(member, ())):
            topic, number = which
            if topic in subscriptions[member] and number < partitions.get(topic, 0) and which not in owner:
                owner[which] = member
                result[member].add(which)
    readers = _readers(subscriptions, partitions)
    for which in everything:
        if which not in owner and readers[which[0]]:
            result[min(readers[which[0]], key=lambda member: (len(result[member]), member))].add(which)
    _level(result, readers)
    return result


def _readers(subscriptions: Subscriptions, partitions: Mapping[str, int]) -> dict[str, list[str]]:
    """The subscribed members of each topic, in order."""
    readers: dict[str, list[str]] = {topic: [] for topic in partitions}
    for member in sorted(subscriptions):
        for topic in subscriptions[member]:
            if topic in readers:
                readers[topic].append(member)
    return readers


def _level(result: Assignment, readers: Mapping[str, list[str]]) -> None:
    """Balance by moving single partitions, always from the fullest member that can give one."""
    ordered = {member: sorted(held) for member, held in result.items()}  # sorted once: there may be thousands of moves
    while _move_one(ordered, readers):
        pass
    result.update({member: set(held) for member, held in ordered.items()})


def _move_one(ordered: dict[str, list[TopicPartition]], readers: Mapping[str, list[str]]) -> bool:
    sizes = {member: len(held) for member, held in ordered.items()}
    if not sizes or max(sizes.values()) - min(sizes.values()) < 2:
        return False
    least: dict[str, str] = {}  # topic -> its subscriber with the fewest partitions
    for full in sorted(ordered, key=lambda member: (-sizes[member], member)):
        held = ordered[full]
        for at in range(len(held) - 1, -1, -1):
            topic = held[at][0]
            if topic not in least:
                least[topic] = min(readers[topic], key=lambda member: (sizes[member], member))
            if sizes[full] - sizes[least[topic]] >= 2:
                insort(ordered[least[topic]], held.pop(at))
                return True
    return False


ASSIGNORS: dict[str, Assignor] = {"uniform": assign_uniform, "range": assign_range}
DEFAULT_ASSIGNOR = "uniform"
