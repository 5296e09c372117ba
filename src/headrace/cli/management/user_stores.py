"""UserStore: the users that `headrace user` works on, at a running broker or in the data folder of a stopped one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.cli.data_folder.folder import explain_missing_access
from headrace.cli.management.common import manage
from headrace.errors import NotFound

if TYPE_CHECKING:
    from headrace.broker.access.offline import OfflineUsers
    from headrace.client.management import Management

Shape = dict[str, Any]  # an object in the format of RabbitMQ's management API


class UserStore(Protocol):
    def users(self) -> list[Shape]: ...
    def permissions(self) -> list[Shape]: ...
    def topic_permissions(self) -> list[Shape]: ...
    def exists(self, name: str) -> bool: ...
    def add(self, name: str, password: str, tags: tuple[str, ...]) -> None: ...
    def set_password(self, name: str, password: str) -> None: ...
    def set_tags(self, name: str, tags: tuple[str, ...]) -> None: ...
    def remove(self, name: str) -> None: ...
    def grant(self, vhost: str, user: str, configure: str, write: str, read: str) -> None: ...
    def revoke(self, vhost: str, user: str) -> None: ...
    def grant_topic(self, vhost: str, user: str, exchange: str, write: str, read: str) -> None: ...
    def revoke_topic(self, vhost: str, user: str, exchange: str | None) -> None: ...


@contextmanager
def user_store(url: str | None, config_file: Path | None, data_dir: str | None) -> Iterator[UserStore]:
    if data_dir is not None:
        from headrace.broker.access.offline import offline_users

        with explain_missing_access(data_dir), offline_users(data_dir) as users:
            yield _Folder(users)
    else:
        with manage(url, config_file) as client:
            yield _Broker(client)


class _Broker:
    def __init__(self, client: "Management") -> None:
        self._call = client.call

    def users(self) -> list[Shape]:
        found: list[Shape] = self._call("GET", "users")
        return found

    def permissions(self) -> list[Shape]:
        found: list[Shape] = self._call("GET", "permissions")
        return found

    def topic_permissions(self) -> list[Shape]:
        found: list[Shape] = self._call("GET", "topic-permissions")
        return found

    def exists(self, name: str) -> bool:
        try:
            self._call("GET", "users", name)
        except NotFound:
            return False
        return True

    def add(self, name: str, password: str, tags: tuple[str, ...]) -> None:
        self._call("PUT", "users", name, body={"password": password, "tags": ",".join(tags)})

    def set_password(self, name: str, password: str) -> None:
        known = self._call("GET", "users", name)
        self._call("PUT", "users", name, body={"password": password, "tags": _joined(known["tags"])})

    def set_tags(self, name: str, tags: tuple[str, ...]) -> None:
        self._call("GET", "users", name)  # raises NotFound: PUT would create the user
        self._call("PUT", "users", name, body={"tags": ",".join(tags)})

    def remove(self, name: str) -> None:
        self._call("DELETE", "users", name)

    def grant(self, vhost: str, user: str, configure: str, write: str, read: str) -> None:
        body = {"configure": configure, "write": write, "read": read}
        self._call("PUT", "permissions", vhost, user, body=body)

    def revoke(self, vhost: str, user: str) -> None:
        self._call("DELETE", "permissions", vhost, user)

    def grant_topic(self, vhost: str, user: str, exchange: str, write: str, read: str) -> None:
        body = {"exchange": exchange, "write": write, "read": read}
        self._call("PUT", "topic-permissions", vhost, user, body=body)

    def revoke_topic(self, vhost: str, user: str, exchange: str | None) -> None:
        self._call("DELETE", "topic-permissions", vhost, user, query={"exchange": exchange})


class _Folder:
    def __init__(self, offline: "OfflineUsers") -> None:
        self._offline = offline

    def users(self) -> list[Shape]:
        return [{"name": user.name, "tags": list(user.tags)} for user in self._offline.users.users()]

    def permissions(self) -> list[Shape]:
        return [
            {"user": user, "vhost": vhost, "configure": found.configure, "write": found.write, "read": found.read}
            for (vhost, user), found in self._offline.users.permissions().items()
        ]

    def topic_permissions(self) -> list[Shape]:
        return [
            {"user": user, "vhost": vhost, "exchange": exchange, "write": found.write, "read": found.read}
            for (vhost, user, exchange), found in self._offline.users.topic_permissions().items()
        ]

    def exists(self, name: str) -> bool:
        return any(user.name == name for user in self._offline.users.users())

    def add(self, name: str, password: str, tags: tuple[str, ...]) -> None:
        self._offline.put_user(name, password=password, tags=tags)

    def set_password(self, name: str, password: str) -> None:
        self._offline.users.user(name)
        self._offline.put_user(name, password=password)

    def set_tags(self, name: str, tags: tuple[str, ...]) -> None:
        self._offline.users.user(name)
        self._offline.put_user(name, tags=tags)

    def remove(self, name: str) -> None:
        self._offline.remove_user(name)

    def grant(self, vhost: str, user: str, configure: str, write: str, read: str) -> None:
        self._offline.set_permission(vhost, user, configure=configure, write=write, read=read)

    def revoke(self, vhost: str, user: str) -> None:
        self._offline.clear_permission(vhost, user)

    def grant_topic(self, vhost: str, user: str, exchange: str, write: str, read: str) -> None:
        self._offline.set_topic_permission(vhost, user, exchange, write=write, read=read)

    def revoke_topic(self, vhost: str, user: str, exchange: str | None) -> None:
        self._offline.clear_topic_permission(vhost, user, exchange)


def _joined(tags: list[str] | str) -> str:
    return tags if isinstance(tags, str) else ",".join(tags)
