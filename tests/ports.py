"""Ports for brokers that are killed and started again."""

import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path

LOWEST, HIGHEST = 20_000, 32_000


def free_port() -> int:
    """A free port that no outgoing connection gets by chance.

    While a broker is down, one that the system hands out to some client's end of a connection is taken, and the broker
    cannot listen again; a client that keeps trying it can even connect to itself.
    """
    for port in random.SystemRandom().sample(ports_of(os.environ), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def ports_of(environ: Mapping[str, str]) -> range:
    """The ports of this test process. No other process gets one of them while its broker is down."""
    number = int(environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return range(LOWEST, min(HIGHEST, first_outgoing_port()))[number % count :: count]


def first_outgoing_port() -> int:
    known = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(known.read_text().split()[0]) if known.exists() else HIGHEST
