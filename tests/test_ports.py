"""The ports that tests use for brokers which come back."""

from tests.ports import first_outgoing_port, free_port


def test_no_client_gets_a_brokers_port_while_the_broker_is_down() -> None:
    """Kill tests failed now and then: a client's end of a connection had the port, and the start said "in use"."""
    assert all(free_port() < first_outgoing_port() for _ in range(20))
