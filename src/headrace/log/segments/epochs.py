"""The epochs of a log: in which epoch of the broker each of its records was written, as stored in the state."""

TABLE = "epochs"
Epochs = list[tuple[int, int]]  # epoch, its first offset


def log_key(log_id: int) -> bytes:
    return log_id.to_bytes(8, "big")


def at(epochs: Epochs, offset: int) -> int:
    """The lowest epoch that a record at this offset can have; its own epoch may not be stored yet."""
    return max((epoch for epoch, start in epochs if start <= offset), default=0)


def pack(epochs: Epochs) -> bytes:
    return b"".join(epoch.to_bytes(8, "big") + start.to_bytes(8, "big") for epoch, start in epochs)


def unpack(raw: bytes) -> Epochs:
    return [
        (int.from_bytes(raw[at : at + 8], "big"), int.from_bytes(raw[at + 8 : at + 16], "big"))
        for at in range(0, len(raw), 16)
    ]
