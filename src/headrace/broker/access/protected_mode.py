"""Protected mode: while guest with its default password is the only user, only clients on this machine are served.

Without it, a broker that listens on the network before it has users would accept every client. Listeners ask this
class; they decide themselves whether a client is local.
"""

import logging

from headrace.broker.access.users import LOOPBACK_USERS, User, Users

logger = logging.getLogger("headrace.users")

LOGGED_MAX = 1_000
REFUSED = (
    "protected mode: guest is the only user, so only clients on the broker's machine are served. Create a user there "
    "(headrace user add NAME), or start the broker with --no-protected-mode to serve every client without a login"
)


class ProtectedMode:
    """The setting `protected_mode` together with the current users."""

    def __init__(self, users: Users, *, is_enabled: bool) -> None:
        self._users = users
        self._is_enabled = is_enabled
        self._logged: set[str] = set()

    @property
    def refuses_remote_clients(self) -> bool:
        """Whether a client on another machine is refused because no user could authenticate it."""
        return self._is_enabled and self._users.is_open

    def log_refusal(self, host: str | None) -> None:
        """One line per address: refused clients try again, many times per second."""
        if host is not None and host not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(host)
            logger.warning("a client from %s was refused (%s)", host, REFUSED)

    def may_connect_remotely(self, user: User) -> bool:
        """Whether a user that has logged in may use another machine.

        guest may not: everyone knows its default password. With protected mode off it may, unless it still has that
        password although other users exist.
        """
        if user.name not in LOOPBACK_USERS:
            return True
        return not self._is_enabled and (self._users.is_open or not self._users.guest_is_default)
