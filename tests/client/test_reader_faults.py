"""Both readers after a lost connection and after a seek."""

import pytest

from headrace import AsyncConsumer, Consumer, Message
from headrace.errors import BrokerUnreachable
from tests.client.scripted import CLOSE, ok, scripted

OFFSETS = ok(b'{"topic":"t","partitions":[{"partition":0,"start":0,"end":3}]}')


def page(first: int, last: int) -> bytes:
    messages = b",".join(
        b'{"partition":0,"offset":%d,"timestamp":1,"key":null,"value":"v","headers":{}}' % offset
        for offset in range(first, last)
    )
    return ok(b'{"messages":[%b],"next_offset":%d}' % (messages, last))


def test_reading_continues_at_its_offset_after_a_lost_connection() -> None:
    with scripted(OFFSETS, page(0, 2), CLOSE, page(2, 3)) as server, Consumer("t", server.url) as consumer:
        assert [m.offset for m in consumer.poll()] == [0, 1]
        assert [m.offset for m in consumer.poll()] == [2]
        assert [b"offset=2" in request for request in server.requests[2:]] == [True, True]
        assert consumer.positions == {0: 3}


async def test_reading_with_asyncio_continues_at_its_offset_after_a_lost_connection() -> None:
    with scripted(OFFSETS, page(0, 2), CLOSE, page(2, 3)) as server:
        async with AsyncConsumer("t", server.url) as consumer:
            got: list[Message] = []
            async for message in consumer:
                got.append(message)
                if len(got) == 3:
                    break
        assert [m.offset for m in got] == [0, 1, 2]


def test_positions_are_right_wherever_the_reader_stops() -> None:
    with scripted(OFFSETS, page(0, 3), page(2, 3)) as server, Consumer("t", server.url) as consumer:
        for message in consumer:
            if message.offset == 1:
                break
        assert consumer.positions == {0: 2}
        assert [m.offset for m in consumer.poll()] == [2]
        assert b"offset=2" in server.requests[-1]


def test_a_search_by_time_is_retried_after_a_lost_connection() -> None:
    """It went on from the start of the topic instead."""
    script = (OFFSETS, CLOSE, OFFSETS, page(2, 3), page(2, 3))
    with scripted(*script) as server, Consumer("t", server.url, since_ms=5, retry_s=0) as consumer:
        with pytest.raises(BrokerUnreachable):
            consumer.poll()
        assert [m.offset for m in consumer.poll()] == [2]
        assert b"timestamp=5" in server.requests[3] and b"offset=2" in server.requests[4]


def test_a_reader_may_go_elsewhere_in_the_middle_of_a_batch() -> None:
    """The rest of the batch was handed out, and moved the positions back to where it was."""
    with scripted(OFFSETS, page(0, 3), OFFSETS, page(0, 1)) as server, Consumer("t", server.url) as consumer:
        seen = []
        for message in consumer:
            seen.append(message.offset)
            if seen == [0, 1]:
                consumer.seek("earliest")
            if len(seen) == 3:
                break
        assert seen == [0, 1, 0]
        assert consumer.positions == {0: 1}


async def test_a_reader_with_asyncio_may_go_elsewhere_in_the_middle_of_a_batch() -> None:
    with scripted(OFFSETS, page(0, 3), OFFSETS, page(0, 1)) as server:
        async with AsyncConsumer("t", server.url) as consumer:
            seen = []
            async for message in consumer:
                seen.append(message.offset)
                if seen == [0, 1]:
                    consumer.seek("earliest")
                if len(seen) == 3:
                    break
        assert seen == [0, 1, 0]


def test_a_seek_ends_reading_until_the_end() -> None:
    with scripted(OFFSETS, OFFSETS, page(0, 3), OFFSETS, page(0, 3)) as server, Consumer("t", server.url) as consumer:
        for message in consumer.until_end():
            assert message.offset == 0
            consumer.seek("earliest")
        assert [m.offset for m in consumer.poll()] == [0, 1, 2]
