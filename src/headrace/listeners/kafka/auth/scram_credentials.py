"""SCRAM credentials, described and altered by Kafka's tools (`kafka-configs --entity-type users`).

They are set one mechanism at a time and salted by the client. The broker does not learn the password, so a user created
this way can log in with that mechanism only.
"""

from collections import Counter
from typing import Any

from headrace.broker.access import scram_keys
from headrace.errors import HeadraceError, InvalidInput
from headrace.listeners.common.addresses import is_loopback
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import ClusterRefused, Code, code_of
from headrace.listeners.kafka.request_pipeline import Request

MECHANISMS = {1: scram_keys.SHA256, 2: scram_keys.SHA512}  # by Kafka's number
NUMBERS = {mechanism: number for number, mechanism in MECHANISMS.items()}


async def describe_user_scram_credentials(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    known = {user.name: user.scram for user in context.broker.users.users() if user.scram}
    asked = Counter(user.name for user in fields.users or ()) or Counter(known.keys())
    return {"results": [_described(name, known.get(name), count) for name, count in asked.items()]}


def _described(name: str, found: scram_keys.Credentials | None, count: int) -> dict[str, Any]:
    if count > 1:
        text = f"Cannot describe SCRAM credentials for the same user twice in a single request: {name}"
        return {"user": name, "error_code": Code.DUPLICATE_RESOURCE, "error_message": text}
    if found is None:
        text = f"Attempt to describe a user credential that does not exist: {name}"
        return {"user": name, "error_code": Code.RESOURCE_NOT_FOUND, "error_message": text}
    infos = [{"mechanism": NUMBERS[one], "iterations": keys.iterations} for one, keys in sorted(found.items())]
    return {"user": name, "credential_infos": infos}


async def alter_user_scram_credentials(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """Each user is changed completely or not at all, unless the disk is full."""
    entries = [*fields.deletions, *fields.upsertions]
    results = []
    for name in dict.fromkeys(entry.name for entry in entries):
        try:
            _check_access(context, request)
            for mechanism, keys in _wanted(context, [entry for entry in entries if entry.name == name]).items():
                await context.broker.users.set_scram(name, mechanism, keys)
            results.append({"user": name})
        except _Refused as refused:
            results.append({"user": name, "error_code": refused.code, "error_message": str(refused)})
        except HeadraceError as error:
            results.append({"user": name, "error_code": code_of(error), "error_message": str(error)})
    return {"results": results}


def _check_access(context: KafkaContext, request: Request) -> None:
    context.access_of(request).administer()
    # While the broker is open, a stranger could lock all other clients out by creating the first user.
    if context.gate.is_open and not is_loopback(request.connection.peer[0]):
        raise ClusterRefused("the first user can only be created from the broker's own machine")


class _Refused(Exception):
    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def _wanted(context: KafkaContext, entries: list[Any]) -> dict[str, scram_keys.ScramKeys | None]:
    """Keys by mechanism, None for those to delete, with Kafka's checks and error messages."""
    found: dict[str, scram_keys.ScramKeys | None] = {}
    for entry in entries:
        if not entry.name:
            raise _Refused(Code.UNACCEPTABLE_CREDENTIAL, "Username must not be empty")
        mechanism = MECHANISMS.get(entry.mechanism)
        if mechanism is None:
            raise _Refused(Code.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism")
        if mechanism in found:
            text = "A user credential cannot be altered twice in the same request"
            raise _Refused(Code.DUPLICATE_RESOURCE, text)
        found[mechanism] = _keys(context, mechanism, entry)
    return found


def _keys(context: KafkaContext, mechanism: str, entry: Any) -> scram_keys.ScramKeys | None:
    if not hasattr(entry, "salted_password"):
        if context.broker.users.scram_keys(entry.name, mechanism) is None:
            text = "Attempt to delete a user credential that does not exist"
            raise _Refused(Code.RESOURCE_NOT_FOUND, text)
        return None
    if not scram_keys.ITERATIONS_MIN <= entry.iterations <= scram_keys.ITERATIONS_MAX:
        text = "Too few iterations" if entry.iterations < scram_keys.ITERATIONS_MIN else "Too many iterations"
        raise _Refused(Code.UNACCEPTABLE_CREDENTIAL, text)
    keys = scram_keys.of_salted(mechanism, entry.salted_password, entry.salt, entry.iterations)
    try:
        scram_keys.check({mechanism: keys})
    except InvalidInput as error:
        raise _Refused(Code.UNACCEPTABLE_CREDENTIAL, str(error)) from None
    return keys
