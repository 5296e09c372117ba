"""Large JSON strings are the same bytes as those of msgspec and base64."""

import base64
import threading
from random import Random

import msgspec
import pytest

from headrace.errors import InvalidInput
from headrace.wire.http import json_text

CHARACTERS = '\0\b\t\n\f\r\x1f"/\\\x7f\x80ÿ\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff'
STARTS = (0x80, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF)


def samples() -> list[bytes]:
    random = Random(7)
    texts = ["".join(random.choices(CHARACTERS, k=random.randrange(9))).encode() for _ in range(2000)]
    broken = [bytes([random.choice(STARTS)]) + random.randbytes(random.randrange(4)) for _ in range(4000)]
    return [b"", *texts, *broken, *(random.randbytes(random.randrange(40)) for _ in range(2000))]


def test_text_is_what_msgspec_writes_and_anything_else_is_not_text() -> None:
    for data in samples():
        try:
            expected = msgspec.json.encode(data.decode())
        except UnicodeDecodeError:
            assert json_text.text_size(data) == -1
            with pytest.raises(InvalidInput):
                json_text.text(data)
            continue
        assert json_text.text(data) == expected
        assert json_text.text_size(data) == len(expected)


def test_base64_is_what_python_writes() -> None:
    for data in samples():
        assert json_text.base64_text(data) == b'"' + base64.b64encode(data) + b'"'
        assert json_text.base64_size(len(data)) == len(json_text.base64_text(data))


@pytest.mark.parametrize("encode", [json_text.text, json_text.base64_text, json_text.text_size])
def test_other_threads_run_while_a_large_value_is_encoded(encode) -> None:  # type: ignore[no-untyped-def]
    """A counter in another thread advances during a single call: the call does not hold the GIL."""
    counted, ends = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not ends.is_set():
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        data = bytes(8 << 20)
        for _ in range(1000):  # on a busy machine the other thread may not get a processor during one call
            before = counted
            encode(data)
            if counted - before > 1:
                return
        pytest.fail("the other thread never ran")
    finally:
        ends.set()
        thread.join()
