"""How many connections and queues a virtual host may have: RabbitMQ's vhost limits."""

from collections.abc import Mapping
from typing import Any

from headrace.errors import InvalidInput

CONNECTIONS, QUEUES = "max-connections", "max-queues"
LIMITS = (CONNECTIONS, QUEUES)
LIMIT_MAX = 1 << 31

Limits = dict[str, int]


def parse_limits(given: Any) -> Limits:
    """Whole numbers; one below 0 is no bound, as in RabbitMQ."""
    if not isinstance(given, Mapping):
        raise InvalidInput("the limits of a vhost are an object")
    for name, value in given.items():
        if name not in LIMITS:
            raise InvalidInput(f"the limits of a vhost are {' and '.join(LIMITS)}, not {str(name)[:80]!r}")
        if type(value) is not int or abs(value) > LIMIT_MAX:
            raise InvalidInput(f"{name} of a vhost is a whole number up to {LIMIT_MAX:,}, not {str(value)[:80]!r}")
    return dict(given)


def bound(limits: Limits, name: str) -> int | None:
    found = limits.get(name, -1)
    return found if found >= 0 else None
