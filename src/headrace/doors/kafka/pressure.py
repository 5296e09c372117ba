"""How long producers are asked to wait, step by step, before the door stops reading what they send."""

STEPS: tuple[tuple[int, int], ...] = (  # bytes waiting for the disk, milliseconds
    (64 << 20, 50),
    (96 << 20, 100),
    (128 << 20, 250),
    (192 << 20, 1000),
)
PAUSE_BYTES = 256 << 20


def throttle_ms(pending_bytes: int) -> int:
    wait_ms = 0
    for bytes_min, step_ms in STEPS:
        if pending_bytes >= bytes_min:
            wait_ms = step_ms
    return wait_ms
