"""Client addresses: which are on this machine, and which count as one source for limits and login delays."""

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

# Delay of the reply to a failed login, as in Kafka: clients of Kafka and AMQP retry at once and for ever. There is no
# further penalty, unlike at the HTTP listener: one client with an old password would lock out its whole address.
FAILURE_DELAY_S = 0.1


def parse(host: str) -> IPv4Address | IPv6Address | None:
    """None if the text is not an IP address. An IPv4-mapped IPv6 address becomes the IPv4 address."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str | None) -> bool:
    if not host:
        return True  # a socket without an address is on this machine
    address = parse(host)
    return address is not None and address.is_loopback


@lru_cache(maxsize=4_096)
def source_of(host: str | None) -> str:
    """The source that limits apply to: an IPv4 address or an IPv6 /64 network, since one host has many of the
    addresses of its network."""
    address = parse(host or "")
    if isinstance(address, IPv6Address):
        return str(ip_network((address, 64), strict=False))
    return str(address or host)
