from headrace.record.types import Buffer

FOUND: bool

def decompress_into(data: Buffer, room: memoryview) -> int: ...
