from typing_extensions import Buffer

class Reader:
    """Reads one request. Its methods are callable from Cython only (see the .pxd)."""
    def __init__(self, buffer: Buffer, position: int = 0, end: int = -1) -> None: ...

class Writer:
    """Collects one response. Its methods are callable from Cython only (see the .pxd)."""
    def __init__(self, capacity: int = 256) -> None: ...
