from typing import Literal

from headrace.record.types import Buffer

def properties_fault(data: Buffer) -> Literal["bad", "decision", "plain"]: ...
