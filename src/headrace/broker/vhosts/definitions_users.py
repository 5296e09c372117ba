"""Users and permissions in RabbitMQ's definitions. Password hashes are exported and imported unchanged."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.broker.access import passwords, scram_keys
from headrace.broker.access.permissions import Permission, TopicPermission, check_patterns
from headrace.broker.access.users import Users, check_name, parse_tags
from headrace.errors import InvalidInput

Document = dict[str, Any]


def export(users: Users) -> dict[str, list[Document]]:
    return {
        "users": [
            {
                "name": user.name,
                "password_hash": user.password_hash,
                "hashing_algorithm": user.hashing_algorithm,
                "tags": list(user.tags),
                "limits": user.limits,
                **({"scram": msgspec.to_builtins(user.scram)} if user.scram else {}),
            }
            for user in users.users()
        ],
        "permissions": [
            {"user": user, "vhost": vhost, "configure": found.configure, "write": found.write, "read": found.read}
            for (vhost, user), found in users.permissions().items()
        ],
        "topic_permissions": [
            {"user": user, "vhost": vhost, "exchange": exchange, "write": found.write, "read": found.read}
            for (vhost, user, exchange), found in users.topic_permissions().items()
        ],
    }


class UserDefinitions:
    """The users and permissions of a document. Checked when constructed; `apply` refuses nothing."""

    def __init__(self, users: Users, items: Mapping[str, list[Document]]) -> None:
        self._users = users
        self._changes = [(_text("users", item, "name"), _user(item)) for item in items["users"]]
        known = {name for name, _ in self._changes} | {user.name for user in users.users()}
        self._permissions = [
            (*_vhost_and_user("permissions", item, known), _permission(item)) for item in items["permissions"]
        ]
        self._topics = [
            (
                *_vhost_and_user("topic_permissions", item, known),
                _text("topic_permissions", item, "exchange"),
                _topic_permission(item),
            )
            for item in items["topic_permissions"]
        ]

    @property
    def vhosts(self) -> Iterable[str]:
        """The vhosts that must exist before `apply`."""
        return dict.fromkeys([entry[0] for entry in self._permissions] + [entry[0] for entry in self._topics])

    async def apply(self) -> None:
        for name, changes in self._changes:
            await self._users.put_user(name, **changes)
        for vhost, user, permission in self._permissions:
            await self._users.set_permission(vhost, user, permission)
        for vhost, user, exchange, rule in self._topics:
            await self._users.set_topic_permission(vhost, user, exchange, rule)


def _user(item: Document) -> Document:
    name = _text("users", item, "name")
    check_name("user", name)
    changes: Document = {"tags": parse_tags(item.get("tags", []))}
    limits = item.get("limits") or {}
    if not isinstance(limits, dict):
        raise InvalidInput(f"the limits of user {name!r} must be an object")
    changes["limits"] = limits
    stored, algorithm = item.get("password_hash"), item.get("hashing_algorithm")
    if isinstance(item.get("password"), str) and item["password"]:
        changes["password"] = item["password"]
    elif stored is not None and (stored or algorithm != ""):
        # An earlier version without users exported guest with both empty: leave its password as it is.
        changes["password_hash"] = _text("users", item, "password_hash")
        changes["hashing_algorithm"] = algorithm or passwords.SHA256
        try:
            passwords.check_hash(changes["password_hash"], str(changes["hashing_algorithm"]))
            if "scram" in item:
                changes["scram_keys"] = scram_keys.checked(item["scram"])
        except InvalidInput as error:
            raise InvalidInput(f"user {name!r}: {error}") from None
    return changes


def _vhost_and_user(kind: str, item: Document, known: set[str]) -> tuple[str, str]:
    vhost, user = _text(kind, item, "vhost"), _text(kind, item, "user")
    if user not in known:
        raise InvalidInput(f"one of the {kind} is for user {user!r:.80}, who does not exist")
    return vhost, user


def _permission(item: Document) -> Permission:
    found = Permission(**{name: _text("permissions", item, name) for name in ("configure", "write", "read")})
    check_patterns(found)
    return found


def _topic_permission(item: Document) -> TopicPermission:
    found = TopicPermission(**{name: _text("topic_permissions", item, name) for name in ("write", "read")})
    check_patterns(found)
    return found


def _text(kind: str, item: Document, name: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        shown = {key: value for key, value in item.items() if not key.startswith("password")}
        raise InvalidInput(f"one of the {kind} has no {name}: {str(shown)[:200]}")
    return found
