"""Valid and invalid declarations, with the answers that RabbitMQ 3.10 gave."""

from typing import Any

import pytest

from headrace.broker.types.message import expiration_fault
from headrace.broker.vhosts.declarations import ExchangeDeclared, QueueDeclared
from headrace.broker.vhosts.policies import limits
from headrace.errors import ArgumentMismatch

VALUES: dict[str, Any] = {
    "x-dead-letter-exchange": "dlx",
    "x-dead-letter-strategy": "at-most-once",
    "x-delivery-limit": 5,
    "x-expires": 60_000,
    "x-initial-cluster-size": 1,
    "x-max-age": "1D",
    "x-max-in-memory-bytes": 1000,
    "x-max-in-memory-length": 10,
    "x-max-length": 10,
    "x-max-priority": 5,
    "x-message-ttl": 1000,
    "x-overflow": "drop-head",
    "x-queue-master-locator": "client-local",
    "x-queue-mode": "lazy",
    "x-queue-version": 2,
    "x-quorum-initial-group-size": 1,
    "x-single-active-consumer": True,
    "x-stream-max-segment-size-bytes": 1_000_000,
}
OF_OTHER_TYPES = {
    "classic": {
        *("x-dead-letter-strategy", "x-delivery-limit", "x-initial-cluster-size", "x-max-age"),
        *("x-max-in-memory-bytes", "x-max-in-memory-length"),
        *("x-quorum-initial-group-size", "x-stream-max-segment-size-bytes"),
    },
    "quorum": {
        *("x-initial-cluster-size", "x-max-age", "x-max-priority", "x-queue-master-locator", "x-queue-mode"),
        *("x-queue-version", "x-stream-max-segment-size-bytes"),
    },
    "stream": VALUES.keys() - {"x-initial-cluster-size", "x-max-age", "x-stream-max-segment-size-bytes"},
}


def declared(**arguments: Any) -> QueueDeclared:
    return QueueDeclared(durable=True, exclusive=False, auto_delete=False, arguments=arguments)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("kind", OF_OTHER_TYPES)
def test_an_argument_of_another_queue_type_is_refused(kind: str, name: str) -> None:
    queue = declared(**{name: VALUES[name], "x-queue-type": kind})
    if name not in OF_OTHER_TYPES[kind]:
        queue.check("queue 'q'")
        return
    with pytest.raises(ArgumentMismatch) as caught:
        queue.check("queue 'q'")
    assert str(caught.value) == f"invalid arg '{name}' for queue 'q' of queue type rabbit_{kind}_queue"


def test_the_type_of_an_argument_is_checked_before_its_value() -> None:
    with pytest.raises(ArgumentMismatch, match="of queue type rabbit_classic_queue"):
        declared(**{"x-dead-letter-strategy": "never"}).check("queue 'q'")


def test_a_policy_may_have_keys_that_only_some_of_its_queues_support() -> None:
    assert limits({"max-age": "1D", "dead-letter-strategy": "at-least-once"}).max_age_ms == 86_400_000


TEN_YEARS_MS = 315_360_000_000


@pytest.mark.parametrize("name", ["x-message-ttl", "x-expires"])
def test_a_time_of_more_than_ten_years_is_refused(name: str) -> None:
    declared(**{name: TEN_YEARS_MS}).check("queue 'q'")
    with pytest.raises(ArgumentMismatch) as caught:
        declared(**{name: TEN_YEARS_MS + 1}).check("queue 'q'")
    assert str(caught.value) == f"invalid arg '{name}' for queue 'q': {{value_too_large,315360000001}}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        *[(fine, None) for fine in ("0", "+5", "-0", "00000000000000000005", "315360000000")],
        *[(word, "no_integer") for word in ("soon", "", " 5", "\u0663", 5)],
        ("1.5", '{leftover_string,".5"}'),
        ("5\n", '{leftover_string,"\n"}'),
        ("-1", "{value_negative,-1}"),
        ("315360000001", "{value_too_large,315360000001}"),
        ("9" * 5000, f"{{value_too_large,{'9' * 5000}}}"),
    ],
)
def test_an_expiration_is_parsed_as_by_rabbitmq(text: object, fault: str | None) -> None:
    assert expiration_fault(text) == fault


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"hash-property": "app_id"}, "Unsupported property: app_id"),
        ({"hash-property": ""}, "Unsupported property: "),
        ({"hash-header": "a", "hash-property": "message_id"}, "hash-header and hash-property are mutually exclusive"),
    ],
)
def test_a_consistent_hash_exchange_with_an_unknown_hash_property_is_refused(
    arguments: dict[str, str], sentence: str
) -> None:
    def exchange(kind: str, **more: str) -> ExchangeDeclared:
        return ExchangeDeclared(kind, durable=True, auto_delete=False, internal=False, arguments=arguments | more)

    exchange("direct").check("exchange 'e'")
    delayed = exchange("x-delayed-message", **{"x-delayed-type": "x-consistent-hash"})
    for wrong in (exchange("x-consistent-hash"), delayed):
        with pytest.raises(ArgumentMismatch) as caught:
            wrong.check("exchange 'e'")
        assert str(caught.value) == sentence
