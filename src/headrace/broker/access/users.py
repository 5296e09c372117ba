"""Users, their permissions in each vhost, and their topic permissions. RabbitMQ's model, stored in the catalog.

A change is durable when it returns. `version` grows with every change: a caller that caches an answer must compare it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from headrace.broker.access import passwords
from headrace.broker.access import scram_keys as scram
from headrace.broker.access.permissions import EVERYTHING, Permission, Rights, TopicPermission, check_patterns
from headrace.broker.access.scram_keys import Credentials
from headrace.broker.catalog.catalog import Catalog, Identity, shaped
from headrace.broker.cooperative import to_the_end
from headrace.errors import InvalidInput, NotFound, StorageError

logger = logging.getLogger("headrace.users")

USERS, PERMISSIONS, TOPIC_PERMISSIONS = "users", "permissions", "topic_permissions"
GUEST = DEFAULT_PASSWORD = "guest"
LOOPBACK_USERS = frozenset((GUEST,))  # may connect only from this machine; see protected_mode.py
NAME_BYTES_MAX = 255
TAGS_MAX = 64
# RabbitMQ's tags. Others are kept but have no meaning here.
ADMINISTRATOR, IMPERSONATOR = "administrator", "impersonator"

Key = TypeVar("Key", bound=Identity)
_KEPT = ("password_hash", "hashing_algorithm", "scram", "tags", "limits")


class User(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    password_hash: str = ""  # empty: no login with a password
    hashing_algorithm: str = passwords.SHA256
    scram: Credentials = {}  # of the same password, unless a Kafka client set others
    tags: tuple[str, ...] = ()
    limits: dict[str, Any] = {}

    @property
    def is_administrator(self) -> bool:
        return ADMINISTRATOR in self.tags

    @property
    def may_impersonate(self) -> bool:
        """Whether its messages may carry another user_id."""
        return IMPERSONATOR in self.tags

    def limit(self, name: str) -> int | None:
        """max-connections or max-channels; None: no limit."""
        found = self.limits.get(name)
        return found if type(found) is int and found >= 0 else None


class _StoredUser(msgspec.Struct):
    identity: tuple[str]
    removed: bool = False
    password_hash: str = ""
    hashing_algorithm: str = passwords.SHA256
    scram: Credentials = {}
    tags: tuple[str, ...] = ()
    limits: dict[str, Any] = {}

    def __post_init__(self) -> None:
        try:
            passwords.check_hash(self.password_hash, self.hashing_algorithm)
            scram.check(self.scram)
        except InvalidInput as error:
            raise ValueError(str(error)) from None  # msgspec reports only these as validation errors


class _StoredPermission(Permission, frozen=True, kw_only=True):
    identity: tuple[str, str]


class _StoredTopicPermission(TopicPermission, frozen=True, kw_only=True):
    identity: tuple[str, str, str]


class Users:
    """Reads are answered from memory, on the event loop. Changes are written in a thread, one after the other."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._users: dict[str, User] = {}
        self._permissions: dict[tuple[str, str], Permission] = {}  # by vhost and user
        self._topics: dict[tuple[str, str, str], TopicPermission] = {}  # by vhost, user and exchange
        self._rights: dict[tuple[str, str], Rights | None] = {}
        self._thread = ThreadPoolExecutor(1, "users")
        self._changing = asyncio.Lock()
        self._watchers: list[Callable[[str], None]] = []
        self._was_started = False
        self.version = 0
        self.is_open = False
        self._load()

    def _load(self) -> None:
        for document in self._catalog.load(USERS):
            self._was_started = True
            stored = shaped(USERS, document, _StoredUser)
            if not stored.removed:
                kept = {name: getattr(stored, name) for name in _KEPT}
                self._users[stored.identity[0]] = User(name=stored.identity[0], **kept)
        for document in self._catalog.load(PERMISSIONS):
            found = shaped(PERMISSIONS, document, _StoredPermission)
            permission = Permission(configure=found.configure, write=found.write, read=found.read)
            self._permissions[found.identity] = permission
        for document in self._catalog.load(TOPIC_PERMISSIONS):
            rule = shaped(TOPIC_PERMISSIONS, document, _StoredTopicPermission)
            self._topics[rule.identity] = TopicPermission(write=rule.write, read=rule.read)
        self._changed()

    def first_start(self, vhosts: Iterable[str]) -> None:
        """Create guest in a folder that never had a user: a new one, or one of an earlier version. Blocks."""
        if self._was_started:
            return
        for vhost in vhosts:
            self._catalog.put(PERMISSIONS, (vhost, GUEST), msgspec.to_builtins(EVERYTHING))
            self._permissions[vhost, GUEST] = EVERYTHING
        # The user last: a crash before this leaves a folder that never had a user.
        guest = User(name=GUEST, tags=(ADMINISTRATOR,), **_secrets(DEFAULT_PASSWORD))
        self._catalog.put(USERS, (GUEST,), _document(guest))
        self._users[GUEST] = guest
        self._was_started = True
        self._changed()

    def close(self) -> None:
        self._thread.shutdown()

    # Reading.

    def users(self) -> list[User]:
        return [user for _, user in sorted(self._users.items())]

    def user(self, name: str) -> User:
        found = self._users.get(name)
        if found is None:
            raise NotFound(f"there is no user {name!r}")
        return found

    def has(self, name: str) -> bool:
        return name in self._users

    def permissions(self) -> dict[tuple[str, str], Permission]:
        """By (vhost, user)."""
        return dict(sorted(self._permissions.items()))

    def topic_permissions(self) -> dict[tuple[str, str, str], TopicPermission]:
        """By (vhost, user, exchange)."""
        return dict(sorted(self._topics.items()))

    def authenticate(self, name: str, password: str) -> User | None:
        """None for an unknown user and for a wrong password, after the same amount of work."""
        user = self._users.get(name)
        may_log_in = user is not None and user.password_hash and password
        stored, algorithm = passwords.NOBODY, passwords.SHA256
        if user is not None and may_log_in:
            stored, algorithm = user.password_hash, user.hashing_algorithm
        fits = passwords.fits(password, stored, algorithm)
        return user if fits and may_log_in else None

    def scram_keys(self, name: str, mechanism: str) -> scram.ScramKeys | None:
        user = self._users.get(name)
        return None if user is None else user.scram.get(mechanism)

    def rights(self, user: str, vhost: str) -> Rights | None:
        """None if the user has no access to the vhost."""
        key = (vhost, user)
        if key not in self._rights:
            permission = self._permissions.get(key) if user in self._users else None
            if permission is None:
                return None  # not cached: invalid names would fill the memory
            topics = {exchange: rule for (*where, exchange), rule in self._topics.items() if (*where,) == key}
            self._rights[key] = Rights(user, vhost, permission, topics)
        return self._rights[key]

    @property
    def guest_is_default(self) -> bool:
        """Whether guest exists with its default password."""
        return self.authenticate(GUEST, DEFAULT_PASSWORD) is not None

    # Changing.

    def on_removed(self, watcher: Callable[[str], None]) -> None:
        """Call the watcher with the name of each user that is removed."""
        self._watchers.append(watcher)

    @to_the_end
    async def put_user(
        self,
        name: str,
        *,
        password: str | None = None,
        password_hash: str | None = None,
        hashing_algorithm: str = passwords.SHA256,
        scram_keys: Credentials | None = None,
        tags: Iterable[str] | str | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> User:
        """Create or change a user. Arguments that are None leave their field as it is; a new user without a password
        cannot log in. `scram_keys` belong to `password_hash`: both must be derived from the same password.
        """
        check_name("user", name)
        changes: dict[str, Any] = {}
        if password is not None:
            if not password:
                raise InvalidInput("the password must not be empty; to disable the login, set an empty password_hash")
            changes = await asyncio.get_running_loop().run_in_executor(self._thread, _secrets, password)
        elif password_hash is not None:
            passwords.check_hash(password_hash, hashing_algorithm)
            changes["password_hash"] = password_hash
            changes["hashing_algorithm"] = hashing_algorithm
        if tags is not None:
            changes["tags"] = parse_tags(tags)
        if limits is not None:
            changes["limits"] = dict(limits)
        async with self._changing:
            if password is None and password_hash is not None:
                known = self._users.get(name)
                is_same = password_hash and known is not None and known.password_hash == password_hash
                if scram_keys is not None or not is_same:
                    changes["scram"] = scram_keys or {}  # the keys of the old password would still be accepted
            return await self._put(name, changes)

    @to_the_end
    async def set_scram(self, name: str, mechanism: str, keys: scram.ScramKeys | None) -> None:
        """Set or remove the password of one mechanism, as Kafka's tools do. Creates the user if needed."""
        check_name("user", name)
        if keys is not None:
            scram.check({mechanism: keys})
        async with self._changing:
            known = self._users[name].scram if name in self._users else {}
            if keys is None and mechanism not in known:
                raise NotFound(f"user {name!r} has no password for {mechanism}")
            others = {one: kept for one, kept in known.items() if one != mechanism}
            await self._put(name, {"scram": others if keys is None else {**others, mechanism: keys}})

    async def _put(self, name: str, changes: Mapping[str, Any]) -> User:
        user = msgspec.structs.replace(self._users.get(name) or User(name=name), **changes)
        await self._in_thread(lambda: self._catalog.put(USERS, (name,), _document(user)))
        what = "changed" if name in self._users else "created"
        self._users[name] = user
        self._changed()
        named = [field for field in ("password_hash", "scram", "tags", "limits") if field in changes]
        logger.info("user %r was %s%s", name, what, f" ({', '.join(named)})" if named else "")
        return user

    @to_the_end
    async def remove_user(self, name: str) -> None:
        """Remove the user with its permissions. Watchers close its connections."""
        async with self._changing:
            self.user(name)
            # Permissions first: after a crash in between, a new user of that name must not inherit them.
            await self._drop_rights(lambda _, user: user == name)
            if name == GUEST:
                # Kept as removed, so that first_start does not create it again.
                await self._in_thread(lambda: self._catalog.put(USERS, (name,), {"removed": True}))
            else:
                await self._in_thread(lambda: self._catalog.remove(USERS, (name,)))
            del self._users[name]
            self._changed()
        logger.info("user %r was removed", name)
        for watcher in self._watchers:
            watcher(name)

    @to_the_end
    async def set_permission(self, vhost: str, user: str, permission: Permission) -> None:
        """Raises NotFound if the user does not exist. The caller checks the vhost."""
        check_patterns(permission)
        async with self._changing:
            self.user(user)
            await self._store(PERMISSIONS, (vhost, user), permission)
            self._permissions[vhost, user] = permission
            self._changed()
        words = "user %r may configure %r, write %r and read %r in vhost %r"
        logger.info(words, user, permission.configure, permission.write, permission.read, vhost)

    @to_the_end
    async def clear_permission(self, vhost: str, user: str) -> None:
        async with self._changing:
            if (vhost, user) not in self._permissions:
                raise NotFound(f"user {user!r} has no permissions in vhost {vhost!r}")
            await self._in_thread(lambda: self._catalog.remove(PERMISSIONS, (vhost, user)))
            del self._permissions[vhost, user]
            self._changed()
        logger.info("user %r has no access to vhost %r any more", user, vhost)

    @to_the_end
    async def set_topic_permission(self, vhost: str, user: str, exchange: str, rule: TopicPermission) -> None:
        check_patterns(rule)
        async with self._changing:
            self.user(user)
            await self._store(TOPIC_PERMISSIONS, (vhost, user, exchange), rule)
            self._topics[vhost, user, exchange] = rule
            self._changed()
        words = "user %r may write keys %r and read keys %r of exchange %r in vhost %r"
        logger.info(words, user, rule.write, rule.read, exchange, vhost)

    @to_the_end
    async def clear_topic_permission(self, vhost: str, user: str, exchange: str | None = None) -> None:
        """Remove the rule for one exchange, or all rules of the user in the vhost."""
        async with self._changing:
            gone = [key for key in self._topics if key[:2] == (vhost, user) and exchange in (None, key[2])]
            if not gone:
                raise NotFound(f"user {user!r} has no topic permissions in vhost {vhost!r}")
            await self._drop(TOPIC_PERMISSIONS, self._topics, gone)
        logger.info("user %r may use any key of exchanges %r in vhost %r", user, [key[2] for key in gone], vhost)

    async def vhost_made(self, vhost: str, maker: str | None = None) -> None:
        """The creator of a vhost gets all permissions in it, as in RabbitMQ; so does guest with its default
        password."""
        names = {maker} if maker in self._users else set()
        if self.guest_is_default:
            names.add(GUEST)
        for name in sorted(filter(None, names)):
            await self.set_permission(vhost, name, EVERYTHING)

    @to_the_end
    async def vhost_removed(self, vhost: str) -> None:
        """Called before the vhost is deleted: a new one of the same name must not inherit the permissions."""
        async with self._changing:
            await self._drop_rights(lambda where, _: where == vhost)

    async def _drop_rights(self, is_dropped: Callable[[str, str], bool]) -> None:
        # Permissions first: topic rules only restrict them, so a crash in between never leaves a user with more.
        await self._drop(PERMISSIONS, self._permissions, [key for key in self._permissions if is_dropped(*key)])
        await self._drop(TOPIC_PERMISSIONS, self._topics, [key for key in self._topics if is_dropped(key[0], key[1])])

    async def _drop(self, kind: str, known: dict[Key, Any], gone: Iterable[Key]) -> None:
        for key in gone:
            await self._in_thread(partial(self._catalog.remove, kind, key))
            del known[key]
            self._changed()

    async def _store(self, kind: str, identity: Identity, rule: Permission | TopicPermission) -> None:
        await self._in_thread(lambda: self._catalog.put(kind, identity, msgspec.to_builtins(rule)))

    async def _in_thread(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise StorageError(f"the catalog cannot be written: {error.strerror}") from error

    def _changed(self) -> None:
        self._rights.clear()
        self.is_open = list(self._users) == [GUEST] and self.guest_is_default
        self.version += 1


def _secrets(password: str) -> dict[str, Any]:
    """The fields derived from a password."""
    return {
        "password_hash": passwords.hash_password(password),
        "hashing_algorithm": passwords.SHA256,
        "scram": scram.of_password(password),
    }


def _document(user: User) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(user)
    del document["name"]
    return document


def check_name(what: str, name: str) -> None:
    if not name or len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise InvalidInput(f"the name of a {what} must have 1 to {NAME_BYTES_MAX} bytes")
    if not name.isprintable():
        raise InvalidInput(f"the name of a {what} must not contain control characters: {name!r:.80}")


def parse_tags(tags: Iterable[str] | str) -> tuple[str, ...]:
    """Tags as a list or separated by commas; RabbitMQ accepts both."""
    listed = tags.split(",") if isinstance(tags, str) else tags
    if not isinstance(listed, list | tuple) or not all(isinstance(tag, str) for tag in listed):
        raise InvalidInput("the tags of a user must be strings")
    found = tuple(dict.fromkeys(tag.strip() for tag in listed if tag.strip()))
    if len(found) > TAGS_MAX:
        raise InvalidInput(f"a user has at most {TAGS_MAX} tags")
    for tag in found:
        check_name("tag", tag)
    return found
