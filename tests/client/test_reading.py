"""Reading without a connection: what is asked, and what is made of the answers."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from headrace.client.conversation import Conversation, Follow, Get, Listen, Pause
from headrace.client.exchange import Response
from headrace.client.reading import Reading
from headrace.client.shapes import Message
from headrace.errors import AccessRefused

LONG_S = 3600.0


def answered(content: object) -> Response:
    return Response(200, {"content-type": "application/json"}, json.dumps(content).encode())


def ranges(partitions: int) -> Response:
    return answered({"partitions": [{"partition": n, "start": 0, "end": 0} for n in range(partitions)]})


def page(next_offset: int, *offsets: int, partition: int = 0) -> Response:
    messages = [{"partition": partition, "offset": n, "timestamp": 1, "value": "v"} for n in offsets]
    return answered({"messages": messages, "next_offset": next_offset})


class Stream:
    def __init__(self, response: Response | None = None) -> None:
        self.response = response
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def reading() -> Reading:
    return Reading("t", partition=None, start="earliest", since_ms=None, on_lost="raise", limits={})


def offsets_of(steps: Conversation[Any], answers: Iterable[tuple[type, Any]]) -> list[int]:
    """Of the messages that come of these answers, each to a question of its kind."""
    try:
        asked = next(steps)
        for kind, answer in answers:
            assert isinstance(asked, kind), asked
            asked = steps.send(answer)
        raise AssertionError(f"asks for {asked}")
    except StopIteration as done:
        messages: list[Message] = done.value[0]
        return [message.offset for message in messages]


def test_a_long_poll_answered_early_is_repeated() -> None:
    """Nothing came of a wait that the broker cut short, and it was taken for the end of the time."""
    answers = [(Get, ranges(1)), (Get, page(0)), (Get, page(2)), (Get, page(3, 2))]
    assert offsets_of(reading()._take(LONG_S), answers) == [2]


def test_a_stream_that_ends_before_the_time_is_made_again() -> None:
    stream, second = Stream(), Stream()
    nothing = [(Get, page(0)), (Get, page(0, partition=1))]
    event = b'id: 0:1,1:0\ndata: {"partition":0,"offset":0,"timestamp":1,"value":"v"}\n\n'
    answers = [(Get, ranges(2)), *nothing, (Follow, stream), (Listen, None), (Pause, None)]
    answers += [*nothing, (Follow, second), (Listen, event)]
    assert offsets_of(reading()._take(LONG_S), answers) == [0]
    assert stream.is_closed and not second.is_closed


def test_a_stream_that_is_refused_for_a_moment_is_made_again() -> None:
    full = Stream(Response(503, {"retry-after": "1"}, b""))
    nothing = [(Get, page(0)), (Get, page(0, partition=1))]
    answers = [(Get, ranges(2)), *nothing, (Follow, full), (Listen, b""), (Pause, None), (Get, page(1, 0))]
    assert offsets_of(reading()._take(LONG_S), answers) == [0]


def test_a_stream_that_is_refused_for_good_is_an_error() -> None:
    forbidden = Stream(Response(403, {}, b""))
    answers = [(Get, ranges(2)), (Get, page(0)), (Get, page(0, partition=1)), (Follow, forbidden), (Listen, b"")]
    with pytest.raises(AccessRefused):
        offsets_of(reading()._take(LONG_S), answers)


def test_a_read_without_waiting_sends_no_further_request() -> None:
    assert offsets_of(reading()._take(0), [(Get, ranges(2)), (Get, page(0)), (Get, page(0, partition=1))]) == []
