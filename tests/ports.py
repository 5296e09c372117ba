"""Ports for brokers that are killed and started again."""

import random
import socket
from pathlib import Path

LOWEST, HIGHEST = 20_000, 32_000


def free_port() -> int:
    """A free port that no outgoing connection gets by chance.

    While a broker is down, one that the system hands out to some client's end of a connection is taken, and the broker
    cannot listen again; a client that keeps trying it can even connect to itself.
    """
    for port in random.SystemRandom().sample(range(LOWEST, min(HIGHEST, first_outgoing_port())), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def first_outgoing_port() -> int:
    known = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(known.read_text().split()[0]) if known.exists() else HIGHEST
