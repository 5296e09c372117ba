"""Where a client comes from, and whether that is this machine."""

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network


def parse(host: str) -> IPv4Address | IPv6Address | None:
    """None for what is no address. One of version 4 in the clothes of version 6 is one of version 4."""
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
    """One customer is one address, or one network of version 6, where nobody has a single address."""
    address = parse(host or "")
    if isinstance(address, IPv6Address):
        return str(ip_network((address, 64), strict=False))
    return str(address or host)
