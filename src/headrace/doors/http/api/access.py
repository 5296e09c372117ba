"""Who may use the API. Until users exist there is guest, from this machine only, as in RabbitMQ."""

import base64
import binascii
from ipaddress import ip_address

from starlette.requests import Request

from headrace.errors import HeadraceError

GUEST = "guest"


class NotAuthorised(HeadraceError):
    """Nobody we know."""


def check(request: Request) -> str:
    """The user's name. From this machine nobody needs to say who they are: the rest of this door asks nobody."""
    given = request.headers.get("authorization")
    local = is_loopback(request.client.host if request.client else None)
    if given is None:
        if local:
            return GUEST
        raise NotAuthorised("Login failed")
    scheme, _, encoded = given.partition(" ")
    try:
        user, _, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        raise NotAuthorised("Login failed") from None
    if scheme.lower() != "basic" or (user, password) != (GUEST, GUEST):
        raise NotAuthorised("Login failed")
    if not local:
        raise NotAuthorised("User can only log in via localhost")
    return user


def is_loopback(host: str | None) -> bool:
    if not host:
        return True
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
