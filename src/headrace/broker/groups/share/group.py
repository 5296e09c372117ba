"""One share group: its members, and its progress on each log."""

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.broker.groups.share.members import ShareMember
from headrace.broker.groups.share.partition import SharePartition


@dataclass(slots=True)
class ShareGroup:
    group_id: str
    epoch: int = 0
    members: dict[str, ShareMember] = field(default_factory=dict)
    partitions: dict[int, SharePartition] = field(default_factory=dict)  # by log id
    waiting: set[Callable[[], object]] = field(default_factory=set)  # called when records were returned

    @property
    def state(self) -> str:
        return "Stable" if self.members else "Empty"

    def notify(self) -> None:
        """Call it when records were returned, or locks became free."""
        for callback in list(self.waiting):
            callback()
