"""Who reads which partition: pure functions from subscriptions to assignments.

Both are deterministic and look at nothing but their arguments. `held` is who has what now: uniform
moves as little as balance allows, range does not care.
"""

from collections.abc import Callable, Mapping

TopicPartition = tuple[str, int]
Assignment = dict[str, set[TopicPartition]]
Subscriptions = Mapping[str, frozenset[str]]  # member to topics
Assignor = Callable[[Subscriptions, Mapping[str, int], Mapping[str, set[TopicPartition]]], Assignment]


def assign_range(
    subscriptions: Subscriptions, partitions: Mapping[str, int], held: Mapping[str, set[TopicPartition]]
) -> Assignment:
    """Per topic, in order of member id: equal runs of neighbouring partitions, so that topics with the
    same keys and as many partitions meet at the same member."""
    result: Assignment = {member: set() for member in subscriptions}
    for topic in sorted(partitions):
        readers = sorted(member for member, topics in subscriptions.items() if topic in topics)
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
    """As equal as subscriptions allow, and with as few moves from what is held as that takes."""
    result: Assignment = {member: set() for member in subscriptions}
    everything = [(topic, number) for topic in sorted(partitions) for number in range(partitions[topic])]
    owner: dict[TopicPartition, str] = {}
    for member in sorted(subscriptions):
        for which in sorted(held.get(member, ())):
            topic, number = which
            if topic in subscriptions[member] and number < partitions.get(topic, 0) and which not in owner:
                owner[which] = member
                result[member].add(which)
    readers = {
        topic: sorted(member for member, topics in subscriptions.items() if topic in topics)
        for topic in partitions
    }
    for which in everything:
        if which not in owner and readers[which[0]]:
            result[min(readers[which[0]], key=lambda member: (len(result[member]), member))].add(which)
    _level(result, readers)
    return result


def _level(result: Assignment, readers: Mapping[str, list[str]]) -> None:
    """Move single partitions, always from the fullest member that can give one, until it is level."""
    while _move_one(result, readers):
        pass


def _move_one(result: Assignment, readers: Mapping[str, list[str]]) -> bool:
    for full in sorted(result, key=lambda member: (-len(result[member]), member)):
        for which in sorted(result[full], reverse=True):
            least = min(readers[which[0]], key=lambda member: (len(result[member]), member))
            if len(result[full]) - len(result[least]) >= 2:
                result[full].remove(which)
                result[least].add(which)
                return True
    return False


ASSIGNORS: dict[str, Assignor] = {"uniform": assign_uniform, "range": assign_range}
DEFAULT_ASSIGNOR = "uniform"
