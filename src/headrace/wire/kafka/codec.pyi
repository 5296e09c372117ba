from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from typing_extensions import Buffer

KINDS: dict[str, int]

class Field:
    name: str
    kind: int
    nullable: bool
    array: bool
    tag: int
    default: object
    struct: Struct | None
    def __init__(
        self,
        name: str,
        kind: int,
        *,
        nullable: bool,
        array: bool,
        tag: int,
        default: object,
        struct: Struct | None,
        flexible: bool,
    ) -> None: ...

class Struct:
    name: str
    flexible: bool
    def __init__(
        self,
        name: str,
        fields: Sequence[Field],
        *,
        flexible: bool,
        absent: dict[str, object],
        known: Callable[[], frozenset[str]],
    ) -> None: ...

def decode(struct: Struct, buffer: Buffer, position: int = 0, elements_max: int = 200_000) -> SimpleNamespace: ...
def encode(struct: Struct, values: dict[str, Any], correlation_id: int, header_tags: bool) -> bytes: ...
def encode_body(struct: Struct, values: dict[str, Any]) -> bytes: ...
