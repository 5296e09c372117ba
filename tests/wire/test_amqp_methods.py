"""Methods there and back, and every way of cutting them short."""

import pytest
from pamqp import commands
from pamqp import frame as pamqp_frame
from pamqp.base import Frame

from headrace.wire.amqp.methods import arguments, decode, frame
from headrace.wire.amqp.protocol import FRAME_ERROR, SYNTAX_ERROR, ProtocolError

SAMPLES = [
    (commands.Queue.Declare, {"queue": "q", "durable": True, "nowait": True, "arguments": {"x-message-ttl": 5}}),
    (commands.Exchange.Declare, {"exchange": "e", "exchange_type": "topic", "internal": True}),
    (commands.Basic.Consume, {"queue": "q", "consumer_tag": "c", "no_ack": True, "arguments": {"x": [1, "a"]}}),
    (commands.Basic.Nack, {"delivery_tag": 2**40, "multiple": True, "requeue": False}),
    (commands.Connection.Tune, {"channel_max": 2047, "frame_max": 131072, "heartbeat": 60}),
    (commands.Basic.Get, {"queue": "x" * 255}),
]


@pytest.mark.parametrize(("method", "values"), SAMPLES)
def test_encoded_methods_are_decoded_and_readable_by_pamqp(method: type[Frame], values: dict[str, object]) -> None:
    made = decode(method.index >> 16, method.index & 0xFFFF, arguments(method, **values))
    for name, value in values.items():
        assert getattr(made, name) == value
    _, channel, theirs = pamqp_frame.unmarshal(frame(7, method, **values))
    assert channel == 7
    for name, value in values.items():
        assert getattr(theirs, name) == value


@pytest.mark.parametrize(("method", "values"), SAMPLES)
def test_arguments_cut_short_anywhere_or_too_long_are_a_frame_error(
    method: type[Frame], values: dict[str, object]
) -> None:
    whole = arguments(method, **values)
    for wrong in [whole[:cut] for cut in range(len(whole))] + [whole + b"\0"]:
        with pytest.raises(ProtocolError) as caught:
            decode(method.index >> 16, method.index & 0xFFFF, wrong)
        assert caught.value.code == FRAME_ERROR


def test_names_that_are_not_utf8_are_a_syntax_error() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(60, 70, b"\0\0\x02\xff\xfe\0")
    assert caught.value.code == SYNTAX_ERROR


@pytest.mark.parametrize("depth", [17, 1000, 20_000])
def test_tables_nested_too_deep_are_a_syntax_error(depth: int) -> None:
    table = b""
    for _ in range(depth):
        table = b"\x01aF" + len(table).to_bytes(4, "big") + table
    table = len(table).to_bytes(4, "big") + table
    with pytest.raises(ProtocolError) as caught:
        decode(50, 10, b"\0\0\x01q\0" + table)
    assert caught.value.code == SYNTAX_ERROR


def test_an_unknown_method_is_command_invalid() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(60, 999, b"")
    assert caught.value.code == 503
