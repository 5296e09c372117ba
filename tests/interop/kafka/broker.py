"""A broker with its Kafka listener open."""

from pathlib import Path
from typing import TypeVar

from tests.broker_process import BrokerProcess

T = TypeVar("T")


def present(value: T | None) -> T:
    """A field of a message or of an error, which confluent-kafka declares as optional."""
    assert value is not None
    return value


class KafkaBroker(BrokerProcess):
    def __init__(self, folder: Path, *options: str, http: bool = False, amqp: bool = False) -> None:
        # Some records of tests are years old: retention would take them in the midst of one.
        options = ("--retention-interval", "1h", *options)
        super().__init__(folder, *options, listeners=("kafka", *["http"] * http, *["amqp"] * amqp))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['kafka']}"

    @property
    def http_port(self) -> int:
        return self.ports["http"]

    @property
    def amqp_port(self) -> int:
        return self.ports["amqp"]

    def errors(self) -> list[str]:
        """Lines that a broker that works does not print."""
        return [line for line in self.said().splitlines() if " error " in line or "Traceback" in line]
