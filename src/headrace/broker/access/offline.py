"""Changes users of a data folder while no broker runs, so that the owner of the files is never locked out."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from headrace.broker.access.permissions import Permission, TopicPermission
from headrace.broker.access.users import Users
from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.broker.types.vhost_names import CATALOG_KIND, DEFAULT
from headrace.errors import NotFound, VirtualHostNotFound
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, RealDisk
from headrace.log.standby import follower

T = TypeVar("T")


class OfflineUsers:
    """Blocking versions of the methods of Users, for the command line."""

    def __init__(self, users: Users, vhosts: frozenset[str], runner: asyncio.Runner) -> None:
        self.users = users
        self._vhosts = vhosts
        self._runner = runner

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def put_user(self, name: str, **changes: Any) -> None:
        self._run(self.users.put_user(name, **changes))

    def remove_user(self, name: str) -> None:
        self._run(self.users.remove_user(name))

    def set_permission(self, vhost: str, user: str, *, configure: str, write: str, read: str) -> None:
        self._check(vhost)
        found = Permission(configure=configure, write=write, read=read)
        self._run(self.users.set_permission(vhost, user, found))

    def clear_permission(self, vhost: str, user: str) -> None:
        self._run(self.users.clear_permission(vhost, user))

    def set_topic_permission(self, vhost: str, user: str, exchange: str, *, write: str, read: str) -> None:
        self._check(vhost)
        self._run(self.users.set_topic_permission(vhost, user, exchange, TopicPermission(write=write, read=read)))

    def clear_topic_permission(self, vhost: str, user: str, exchange: str | None) -> None:
        self._run(self.users.clear_topic_permission(vhost, user, exchange))

    def _check(self, vhost: str) -> None:
        if vhost not in self._vhosts:
            raise VirtualHostNotFound(vhost)


@contextmanager
def offline_users(data_dir: str, disk: Disk | None = None) -> Iterator[OfflineUsers]:
    """Raises DataFolderLocked while a broker uses the folder, and NotFound if it is not a data folder."""
    disk = disk or RealDisk()
    if not disk.exists(f"{data_dir}/{paths.CATALOG}"):
        raise NotFound(f"{data_dir} is not the data folder of a broker")
    lock = disk.lock(f"{data_dir}/{paths.LOCK}")
    try:
        follower.promote(disk, data_dir)  # a standby's copy would differ from its leader after a change
        with asyncio.Runner() as runner:
            catalog = FileCatalog(disk, data_dir)
            vhosts = frozenset((DEFAULT, *(document["identity"][0] for document in catalog.load(CATALOG_KIND))))
            users = Users(catalog)
            try:
                users.first_start(vhosts)
                yield OfflineUsers(users, vhosts, runner)
            finally:
                users.close()
    finally:
        disk.close(lock)
