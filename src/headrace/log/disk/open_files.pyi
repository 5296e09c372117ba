from collections import OrderedDict
from threading import Lock

from headrace.log.disk.disk import Disk

class OpenFile:
    path: str
    file: int
    users: int
    def __init__(self, path: str, file: int) -> None: ...

class OpenFiles:
    disk: Disk
    _lock: Lock
    _open: dict[str, OpenFile]
    _idle: OrderedDict[str, OpenFile]  # may be closed: neither in use nor dirty
    _dirty: set[str]  # all of them are open
    def __init__(self, disk: Disk, lock: Lock, idle: OrderedDict[str, OpenFile]) -> None: ...
    def _use(self, entry: OpenFile) -> OpenFile: ...
    def hold(self, path: str) -> OpenFile | None: ...
    def release(self, entry: OpenFile, dirty: bool = False) -> None: ...
