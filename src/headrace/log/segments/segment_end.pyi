from collections.abc import Sequence

from headrace.log.segments.index import Walker
from headrace.log.segments.segment import Segment

Bytes = bytes | bytearray | memoryview

class SegmentEnd:
    segment: Segment
    walker: Walker
    is_torn: bool  # a write failed half-way: bytes may lie behind the segment's end
    def __init__(self, segment: Segment, walker: Walker) -> None: ...
    @property
    def index_is_due(self) -> bool: ...
    def appended(self, data: Sequence[Bytes]) -> None: ...
    def _publish(self) -> None: ...
