"""NonBlockingOutput with readers that are gone or do not read."""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import pytest

from headrace import nonblocking_stdio
from headrace.nonblocking_stdio import NonBlockingOutput


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        yield reader, stream
    with suppress(OSError):
        os.close(reader)


def fill(stream: TextIO) -> None:
    os.set_blocking(stream.fileno(), False)
    with suppress(BlockingIOError):
        while True:
            os.write(stream.fileno(), bytes(nonblocking_stdio.CHUNK_BYTES))
    os.set_blocking(stream.fileno(), True)


def empty(reader: int) -> bytes:
    found = []
    os.set_blocking(reader, False)
    with suppress(BlockingIOError):
        while data := os.read(reader, 1 << 20):
            found.append(data)
    return b"".join(found)


def test_a_line_is_written_at_once_and_completely(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    line = "ä" * 3 * nonblocking_stdio.CHUNK_BYTES + "\n"
    NonBlockingOutput(stream).write(line)
    assert empty(reader).decode() == line


def test_a_reader_that_does_not_read_does_not_block_the_writer(
    pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nonblocking_stdio, "PATIENCE_MS", 1)
    reader, stream = pipe
    out = NonBlockingOutput(stream)
    fill(stream)
    out.write("left out\n")
    empty(reader)
    out.write("heard\n")
    assert empty(reader) == b"heard\n"


def test_a_closed_output_is_ignored(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    os.close(reader)
    NonBlockingOutput(stream).write("to a closed pipe\n")
    terminal, line = os.openpty()
    os.close(terminal)
    with open(line, "w") as stream:
        NonBlockingOutput(stream).write("to a closed terminal\n")
