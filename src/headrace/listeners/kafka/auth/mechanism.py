"""What the mechanisms of SASL have in common, and the simplest of them."""

from typing import Protocol

from headrace.broker.access.users import User, Users
from headrace.errors import HeadraceError

PLAIN = "PLAIN"


class LoginRefused(HeadraceError):
    """What the client is told; why is for the log."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text)
        self.why = why


class Exchange(Protocol):
    """One login: tokens of the client and answers, until there is a user."""

    mechanism: str
    user: User | None

    def take(self, token: bytes) -> bytes:
        """The answer; LoginRefused if there is no way on."""
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
    """(user, password) of a PLAIN token, with Kafka's checks and in Kafka's words."""
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
    # A password is the bytes it comes in, as at the other listeners; escapes keep those that are no UTF-8.
    return name.decode("utf-8", "replace"), password.decode("utf-8", "surrogateescape")


def wrong(mechanism: str, why: str) -> LoginRefused:
    """The same for a user there is not as for a wrong password, in Kafka's words."""
    if mechanism == PLAIN:
        return LoginRefused("Authentication failed: Invalid username or password", why)
    text = f"Authentication failed during authentication due to invalid credentials with SASL mechanism {mechanism}"
    return LoginRefused(text, why)
