"""What a queue's arguments and the policies that fit it make together."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.broker.queues.queue_arguments import QueueArguments, parse_arguments
from headrace.broker.vhosts.policies import TIGHTEST, Policies, Policy, check, limits, merge
from headrace.errors import InvalidInput
from headrace.log.disk.disk import RealDisk
from tests.broker.queue_world import declare, opened, say

NUMBERS = {
    "message-ttl": "ttl_ms",
    "expires": "expires_ms",
    "max-length": "length_max",
    "max-length-bytes": "bytes_max",
}


def policy(pattern: str = ".*", **definition: object) -> Policy:
    return Policy(
        vhost="/", name="p", pattern=pattern, definition={k.replace("_", "-"): v for k, v in definition.items()}
    )


@pytest.mark.parametrize("key", NUMBERS)
@settings(deadline=None)
@given(own=some.none() | some.integers(1, 1000), given_=some.integers(1, 1000))
def test_of_two_bounds_the_tighter_holds(key: str, own: int | None, given_: int) -> None:
    field = NUMBERS[key]
    arguments: dict[str, Any] = {field: own}
    merged = merge(QueueArguments(**arguments), limits({key: given_}))
    assert getattr(merged, field) == min(given_ if own is None else own, given_)


def test_where_the_dead_go_is_the_arguments_business_first() -> None:
    own = QueueArguments(dead_letter_exchange="mine", dead_letter_key="here")
    assert merge(own, limits({"dead-letter-exchange": "theirs", "dead-letter-routing-key": "there"})) == own
    merged = merge(QueueArguments(), limits({"dead-letter-exchange": "", "dead-letter-routing-key": "there"}))
    assert (merged.dead_letter_exchange, merged.dead_letter_key) == ("", "there")


def test_a_routing_key_without_an_exchange_moves_nothing() -> None:
    assert merge(QueueArguments(), limits({"dead-letter-routing-key": "there"})) == QueueArguments()


def test_without_a_policy_the_arguments_hold_as_they_are() -> None:
    own = QueueArguments(length_max=3, overflow="reject-publish", retain_ms=5)
    assert merge(own, None) == own
    assert merge(own, limits({"ha-mode": "all"})) == own


def test_a_policy_never_changes_the_type_of_a_queue() -> None:
    own = QueueArguments(kind="quorum", priority_max=0, single_active=True, delivery_limit=20)
    merged = merge(own, limits({"max-length": 5, "delivery-limit": 3, "retain-ms": 9}))
    assert (merged.kind, merged.single_active, merged.delivery_limit, merged.retain_ms) == ("quorum", True, 3, 9)


@pytest.mark.parametrize(
    ("own", "given_", "holds"),
    [
        (None, None, 20),
        (None, 123, 123),
        (None, 3, 3),
        (None, -1, None),
        (50, 123, 50),
        (50, -1, 50),
        (-1, 5, 5),
        (-1, -1, None),
        (-1, None, None),
    ],
)
def test_a_policy_overrides_the_default_delivery_limit(own: int | None, given_: int | None, holds: int | None) -> None:
    """Twenty is what a quorum queue has when neither its arguments nor a policy say anything, as in RabbitMQ 4."""
    arguments = {"x-queue-type": "quorum"} | ({} if own is None else {"x-delivery-limit": own})
    declared = parse_arguments("q", arguments)
    policy_ = limits({"max-length": 9} if given_ is None else {"delivery-limit": given_})
    assert merge(declared, policy_).returns_max == holds


async def test_a_message_is_requeued_up_to_the_delivery_limit_of_a_policy(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        queue = await declare(host, "q", x_queue_type="quorum")
        unlimited = Policy(vhost="/", name="p", pattern="q", definition={"delivery-limit": -1})
        await broker.policies.put(unlimited)
        say(queue, b"again")
        await host.flushes.wait_all_durable()
        for _ in range(30):
            taken = queue.get()
            assert taken is not None, "gone"
            queue.give_back(taken[0], taken[1])


@pytest.mark.parametrize("pattern", [r"^(?!amq\.).*", "^orders$", "", r"\.dead$", "^a(b|c)d"])
def test_patterns_of_many_guides_are_taken(pattern: str) -> None:
    check(policy(pattern, max_length=1))


@pytest.mark.parametrize("pattern", ["(", "(?!a)", "x" * 2000, r"(a)\1"])
def test_patterns_that_cannot_be_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidInput):
        check(policy(pattern, max_length=1))


def test_every_bound_that_is_compared_is_a_field() -> None:
    assert set(TIGHTEST) <= set(QueueArguments.__struct_fields__)


def test_a_stored_pattern_that_is_no_longer_valid_matches_nothing_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier version took possessive repeats. The broker starts all the same, and says which policy it is."""
    catalog = FileCatalog(RealDisk(), str(tmp_path))
    catalog.put("policies", ("/", "old"), {"pattern": "a++b", "definition": {"max-length": 1}})
    policies = Policies(catalog)
    assert not policies.get("/", "old").fits_name("aab")
    assert "'old'" in caplog.text and "a++b" in caplog.text
    policies.close()
