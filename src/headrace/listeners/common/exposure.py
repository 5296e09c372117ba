"""What a started broker exposes to whom: one sentence for the operator, printed at start-up."""

from collections.abc import Mapping, Sequence

from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.access.users import Users
from headrace.listeners.common.addresses import is_loopback


def listeners_on_the_network(addresses: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the listeners with an address that other machines can reach. `addresses` are `HOST:PORT`."""
    return [
        name
        for name, bound in addresses.items()
        if not all(is_loopback(address.rpartition(":")[0].strip("[]")) for address in bound)
    ]


def describe_exposure(users: Users, protected_mode: ProtectedMode, addresses: Mapping[str, Sequence[str]]) -> str:
    on_network = listeners_on_the_network(addresses)
    names = _joined(on_network)
    if not on_network:
        login = "without a login until you create a user" if users.is_open else "after a login"
        return f"only programs on this machine can connect, {login}"
    if not users.is_open:
        return f"other machines can connect to {names}, after a login"
    if protected_mode.refuses_remote_clients:
        return (
            f"{names} can be reached from other machines, but only programs on this machine are served until you "
            "create a user (protected mode)"
        )
    return f"every machine that can reach {names} has full access without a login, because protected mode is off"


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
