"""The interface of SASL mechanisms, and PLAIN."""

from typing import Protocol

from headrace.broker.access.users import User, Users
from headrace.errors import HeadraceError

PLAIN = "PLAIN"


class LoginRefused(HeadraceError):
    """The text goes to the client; `why` goes to the broker's log only."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text)
        self.why = why


class SaslExchange(Protocol):
    """One login: a sequence of client tokens and answers, until `user` is set."""

    mechanism: str
    user: User | None

    def take(self, token: bytes) -> bytes:
        """The answer to a token. Raises LoginRefused."""
        ...


class Plain:
    mechanism = PLAIN

    def __init__(self, users: Users) -> None:
        self._users = users
        self.user: User | None = None

    def take(self, token: bytes) -> bytes:
        name, password = plain(token)
        self.user = self._users.authenticate(name, password)
        if self.user is None:
            raise wrong(PLAIN, f"user {name!r:.100} - invalid credentials")
        return b""


def plain(token: bytes) -> tuple[str, str]:
    """(user, password) of a PLAIN token, with Kafka's checks and error messages."""
    count = token.count(b"\0") + 1
    if count != 3:
        text = f"Invalid SASL/PLAIN response: expected 3 tokens, got {count}"
        raise LoginRefused(text, text)
    acts_as, name, password = token.split(b"\0")
    for what, value in (("username", name), ("password", password)):
        if not value:
            text = f"Authentication failed: {what} not specified"
            raise LoginRefused(text, text)
    if acts_as not in (b"", name):
        text = "Authentication failed: Client requested an authorization id that is different from username"
        raise LoginRefused(text, text)
    # A password is a byte string, as in the other listeners: surrogateescape keeps bytes that are not UTF-8.
    return name.decode("utf-8", "replace"), password.decode("utf-8", "surrogateescape")


def wrong(mechanism: str, why: str) -> LoginRefused:
    """Kafka's error message, the same for an unknown user as for a wrong password."""
    if mechanism == PLAIN:
        return LoginRefused("Authentication failed: Invalid username or password", why)
    text = f"Authentication failed during authentication due to invalid credentials with SASL mechanism {mechanism}"
    return LoginRefused(text, why)
