from typing_extensions import Buffer

class Cells:
    def __init__(
        self, offsets: Buffer | None, data: Buffer | None, validity: Buffer | None, first: int, count: int
    ) -> None: ...

class Numbers:
    def __init__(self, buffer: Buffer, first: int, count: int) -> None: ...

class Rows:
    count: int
    def __init__(
        self,
        count: int,
        numbers: dict[str, Numbers],
        keys: Cells,
        values: Cells,
        header_offsets: Buffer,
        headers_first: int,
        names: Cells,
        header_values: Cells,
    ) -> None: ...
    def render(self, bytes_max: int) -> bytes: ...
