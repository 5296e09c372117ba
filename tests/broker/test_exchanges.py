"""Exchange types, compared with simple definitions."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.routing.exchanges import (
    Binding,
    ConsistentHash,
    Destination,
    Exchange,
    Headers,
    is_kind,
    make_exchange,
)
from headrace.broker.routing.router import Routing
from headrace.broker.routing.topic_trie import TopicTrie
from headrace.broker.types.message import Message
from headrace.errors import ArgumentMismatch, InvalidInput
from tests.listeners.amqp.running import Traced

words = st.sampled_from(["a", "b", "stock", "", "*x"])
keys = st.lists(words, min_size=1, max_size=5).map(".".join)
patterns = st.lists(st.one_of(words, st.sampled_from(["*", "#"])), min_size=1, max_size=6).map(".".join)


def topic_oracle(pattern: str, key: str) -> bool:
    """By a regular expression over words, each ended by a dot."""
    parts = {"*": r"[^.]*\.", "#": r"([^.]*\.)*"}
    expression = "".join(parts.get(word, re.escape(word) + r"\.") for word in pattern.split("."))
    return re.fullmatch(expression, key + ".") is not None


@given(st.lists(patterns, max_size=6), keys)
def test_topic_patterns_match_as_specified(given_patterns: list[str], key: str) -> None:
    trie: TopicTrie[int] = TopicTrie()
    for number, pattern in enumerate(given_patterns):
        trie.add(pattern, number)
    assert set(trie.match(key)) == {n for n, p in enumerate(given_patterns) if topic_oracle(p, key)}


@given(st.lists(patterns, max_size=6), keys)
def test_a_removed_pattern_leaves_nothing_behind(given_patterns: list[str], key: str) -> None:
    trie: TopicTrie[int] = TopicTrie()
    for number, pattern in enumerate(given_patterns):
        trie.add(pattern, number)
    for number, pattern in enumerate(given_patterns):
        trie.remove(pattern, number)
    assert not list(trie.match(key))
    assert not trie._root.children


def test_many_hashes_in_a_pattern_do_not_explode() -> None:
    trie: TopicTrie[int] = TopicTrie()
    trie.add(".".join(["#", "a"] * 20), 1)
    assert not list(trie.match(".".join(["a"] * 19 + ["b"])))


def queue(name: str) -> Any:
    return SimpleNamespace(name=name, durable=True)


def bound(exchange: Exchange, **bindings: Any) -> Exchange:
    for name, key in bindings.items():
        arguments = key if isinstance(key, dict) else {}
        exchange.bind(Binding(exchange.name, queue(name), "" if isinstance(key, dict) else key, arguments))
    return exchange


def names(exchange: Exchange, key: str, headers: dict[str, Any] | None = None) -> list[str]:
    return sorted(destination.name for destination in exchange.match(key, headers))


def test_direct_takes_equal_keys_and_fanout_all() -> None:
    direct = bound(make_exchange("d", "direct"), one="a", two="b", three="a")
    assert names(direct, "a") == ["one", "three"]
    assert names(direct, "c") == []
    fanout = bound(make_exchange("f", "fanout"), one="a", two="b")
    assert names(fanout, "whatever") == ["one", "two"]


def test_a_binding_made_twice_is_one_and_unbinding_removes_it() -> None:
    exchange, target = make_exchange("d", "direct"), queue("q")
    first = Binding("d", target, "k", {})
    assert exchange.bind(first)
    assert not exchange.bind(Binding("d", target, "k", {}))
    assert exchange.unbind(first.identity) is first
    assert exchange.unbind(first.identity) is None
    assert names(exchange, "k") == []


@pytest.mark.parametrize(
    ("wanted", "headers", "fits"),
    [
        ({"x-match": "all", "a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, True),
        ({"x-match": "all", "a": 1, "b": 2}, {"a": 1}, False),
        ({"a": 1}, {"a": 1}, True),
        ({"x-match": "any", "a": 1, "b": 2}, {"b": 2}, True),
        ({"x-match": "any", "a": 1}, {}, False),
        ({"x-match": "all", "x-death": "no", "a": 1}, {"a": 1}, True),
        ({"x-match": "all-with-x", "x-death": "no", "a": 1}, {"a": 1}, False),
        ({"x-match": "any-with-x", "x-q": 1}, {"x-q": 1}, True),
        ({"x-match": "all", "a": None}, {"a": "anything"}, True),
        ({}, {"a": 1}, True),
        ({"a": True}, {"a": 1}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": True}, {"a": True}, True),
    ],
)
def test_headers_match_all_or_any(wanted: dict[str, Any], headers: dict[str, Any], fits: bool) -> None:
    assert Headers.fits(wanted, headers) is fits


def test_headers_refuse_an_unknown_mode() -> None:
    with pytest.raises(InvalidInput):
        bound(make_exchange("h", "headers"), q={"x-match": "some"})


def test_the_consistent_hash_spreads_by_weight_and_moves_few_keys_when_a_queue_leaves() -> None:
    exchange = bound(make_exchange("c", "x-consistent-hash"), one="1", two="1", four="2")
    before = {f"key-{n}": names(exchange, f"key-{n}")[0] for n in range(4000)}
    counts = {name: list(before.values()).count(name) for name in ("one", "two", "four")}
    assert counts["four"] > 1.3 * counts["one"]
    assert min(counts.values()) > 500
    gone = next(b for b in exchange.bindings.values() if b.destination.name == "two")
    exchange.unbind(gone.identity)
    assert all(names(exchange, key) == [name] for key, name in before.items() if name != "two")


def test_a_consistent_hash_exchange_routes_a_message_with_several_keys_to_one_queue() -> None:
    routing: Routing[Destination] = Routing("/")
    exchange = routing.exchanges["c"] = bound(make_exchange("c", "x-consistent-hash"), **dict.fromkeys("abcdef", "1"))
    message = Message("c", "0", b"\0\0", b"")
    assert len(routing.route_message(exchange, [str(n) for n in range(20)], message, {}).queues) == 1


def test_an_alternate_exchange_gets_a_message_only_if_none_of_its_keys_match() -> None:
    """Regression: a message with one unmatched key among others also went to the alternate exchange."""
    routing: Routing[Destination] = Routing("/")
    exchange = bound(make_exchange("d", "direct", arguments={"alternate-exchange": "other"}), first="1", second="2")
    routing.exchanges |= {"d": exchange, "other": bound(make_exchange("other", "fanout"), rest="")}

    def reached(*keys: str) -> list[str]:
        routed = routing.route_message(exchange, keys, Message("d", keys[0], b"\0\0", b""), {})
        return sorted(queue.name for queue in routed.queues)

    assert reached("1", "2", "3") == ["first", "second"]
    assert reached("3", "4") == ["rest"]


def test_a_weight_must_be_a_number() -> None:
    with pytest.raises(ArgumentMismatch):
        bound(make_exchange("c", "x-consistent-hash"), q="heavy")


def test_the_weight_of_a_consistent_hash_binding_is_limited() -> None:
    """Regression: inserting each point into a ring of hundreds of thousands blocked for seconds."""
    exchange = make_exchange("c", "x-consistent-hash")
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        bound(exchange, one="200", two="200")
    finally:
        sys.setprofile(None)
    points = 2 * 200 * ConsistentHash.POINTS_PER_WEIGHT
    assert calls / points < 20
    assert {one for key in range(100) for one in names(exchange, str(key))} == {"one", "two"}


def test_a_point_of_a_consistent_hash_takes_eight_bytes() -> None:
    """Regression: a binding of the largest weight took 1.8 MB."""
    exchange, light = make_exchange("c", "x-consistent-hash"), Binding("c", queue("light"), "1", {})
    for _ in range(3):  # numbers of bindings that are gone are used again
        exchange.bind(light)
        exchange.unbind(light.identity)
    with Traced() as memory:
        bound(exchange, heavy="200")
        names(exchange, "a")
    assert memory.kept_bytes < 12 * 200 * ConsistentHash.POINTS_PER_WEIGHT


def test_removing_one_of_two_consistent_hash_bindings_keeps_the_queue_bound() -> None:
    exchange, twice = make_exchange("c", "x-consistent-hash"), queue("twice")
    bindings = [Binding("c", twice, key, {}) for key in ("1", "2")]
    for binding in bindings:
        exchange.bind(binding)
    exchange.unbind(bindings[0].identity)
    assert names(exchange, "a") == ["twice"]
    exchange.unbind(bindings[1].identity)
    assert names(exchange, "a") == []


def test_a_delayed_exchange_matches_as_the_kind_it_names() -> None:
    exchange = make_exchange("x", "x-delayed-message", arguments={"x-delayed-type": "topic"})
    assert exchange.declared_kind == "x-delayed-message"
    assert names(bound(exchange, q="a.*"), "a.b") == ["q"]
    wrong: dict[str, Any]
    for wrong in ({}, {"x-delayed-type": ["topic"]}, {"x-delayed-type": {}}, {"x-delayed-type": "nothing"}):
        with pytest.raises(ArgumentMismatch):
            make_exchange("x", "x-delayed-message", arguments=wrong)
    assert is_kind("x-delayed-message") and not is_kind("x-nothing")
