"""The ports that tests use for brokers which come back."""

from tests.ports import first_outgoing_port, free_port, ports_of


def test_no_client_gets_a_brokers_port_while_the_broker_is_down() -> None:
    """Kill tests failed now and then: a client's end of a connection had the port, and the start said "in use"."""
    assert all(free_port() < first_outgoing_port() for _ in range(20))


def test_no_other_process_of_the_suite_gets_a_brokers_port_while_the_broker_is_down() -> None:
    workers = [{"PYTEST_XDIST_WORKER": f"gw{number}", "PYTEST_XDIST_WORKER_COUNT": "3"} for number in range(3)]
    shares = [set(ports_of(worker)) for worker in workers]
    assert sum(map(len, shares)) == len(set.union(*shares)) == len(ports_of({}))
    assert min(map(len, shares)) > 1000
