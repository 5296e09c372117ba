#!/usr/bin/env python3
"""Manages a Headrace or RabbitMQ broker through its HTTP API, with the command line of RabbitMQ's rabbitmqadmin 3.x.

The broker serves this file as /cli/rabbitmqadmin; it is never imported. It needs Python 3.10 and nothing else.
"""

import argparse
import base64
import json
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

Json = dict[str, Any]
TIMEOUT_S = 60

# What can be listed: the path, whether a vhost may follow it, and the columns that are shown if none are named.
LISTS: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "bindings": ("/bindings", True, ("source", "destination", "routing_key")),
    "channels": ("/channels", False, ("name", "user")),
    "connections": ("/connections", False, ("name", "user", "channels")),
    "consumers": ("/consumers", True, ("consumer_tag", "queue.name", "ack_required")),
    "exchanges": ("/exchanges", True, ("name", "type")),
    "nodes": ("/nodes", False, ("name", "type", "mem_used")),
    "operator_policies": ("/operator-policies", True, ("name", "vhost", "pattern", "definition")),
    "parameters": ("/parameters", False, ("component", "name", "vhost", "value")),
    "permissions": ("/permissions", False, ("user", "vhost", "configure", "write", "read")),
    "policies": ("/policies", True, ("name", "vhost", "pattern", "definition")),
    "queues": ("/queues", True, ("name", "messages")),
    "users": ("/users", False, ("name", "tags")),
    "vhost_limits": ("/vhost-limits", True, ("vhost", "value")),
    "vhosts": ("/vhosts", False, ("name", "messages")),
}


class Noun(NamedTuple):
    """What can be declared and deleted. {vhost} and the names of arguments stand in its path."""

    path: str
    required: tuple[str, ...] = ()  # to declare it
    optional: Mapping[str, Any] = MappingProxyType({})
    delete_path: str | None = None
    method: str = "PUT"


BINDING = "/bindings/{vhost}/e/{source}/{destination_type}/{destination}"
POLICY = {"priority": 0, "apply-to": "all"}
NOUNS = {
    "binding": Noun(
        BINDING,
        ("source", "destination"),
        {"destination_type": "queue", "routing_key": "", "arguments": {}},
        BINDING + "/{properties_key}",
        "POST",
    ),
    "exchange": Noun(
        "/exchanges/{vhost}/{name}",
        ("name", "type"),
        {"auto_delete": "false", "durable": "true", "internal": "false", "arguments": {}},
    ),
    "operator_policy": Noun("/operator-policies/{vhost}/{name}", ("name", "pattern", "definition"), POLICY),
    "parameter": Noun("/parameters/{component}/{vhost}/{name}", ("component", "name", "value")),
    "permission": Noun("/permissions/{vhost}/{user}", ("user", "configure", "write", "read")),
    "policy": Noun("/policies/{vhost}/{name}", ("name", "pattern", "definition"), POLICY),
    "queue": Noun(
        "/queues/{vhost}/{name}",
        ("name",),
        {"auto_delete": "false", "durable": "true", "arguments": {}, "queue_type": None},
    ),
    "user": Noun("/users/{name}", ("name", "tags"), {"password": None, "password_hash": None}),
    "vhost": Noun("/vhosts/{name}", ("name",), {"description": None, "tags": None, "default_queue_type": None}),
    "vhost_limit": Noun("/vhost-limits/{vhost}/{name}", ("name", "value")),
}
JSON_ARGUMENTS = ("arguments", "definition", "value", "properties")


def stop(text: str) -> NoReturn:
    sys.exit("*** " + text)


# Arguments


def pairs_of(words: list[str]) -> Json:
    """name=value arguments; those that are JSON are parsed."""
    found: Json = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            stop(f"argument {word!r} is not of the form name=value")
        found[name] = value
        if name in JSON_ARGUMENTS:
            try:
                found[name] = json.loads(value)
            except ValueError:
                stop(f"{name} must be JSON, not {value!r}")
    return found


def noun_of(words: list[str], verb: str) -> tuple[str, list[str]]:
    if not words or words[0] not in NOUNS:
        stop(f"{verb} what? One of: {', '.join(sorted(NOUNS))}")
    return words[0], words[1:]


def arguments_of(words: list[str], required: tuple[str, ...], optional: Mapping[str, Any]) -> Json:
    given = pairs_of(words)
    missing = [name for name in required if name not in given]
    if missing:
        stop(f"missing: {', '.join(missing)}")
    unknown = [name for name in given if name not in required and name not in optional and name != "vhost"]
    if unknown:
        known = ", ".join([*required, *optional])
        stop(f"unknown argument {', '.join(unknown)}; expected: {known}")
    return {**{name: value for name, value in optional.items() if value is not None}, **given}


class Client:
    def __init__(self, options: argparse.Namespace) -> None:
        scheme = "https" if options.ssl else "http"
        self._base = f"{scheme}://{options.host}:{options.port}{options.path_prefix}/api"
        login = f"{options.username}:{options.password}".encode()
        self._headers = {"Authorization": "Basic " + base64.b64encode(login).decode()}
        self._context: ssl.SSLContext | None = None
        if options.ssl:
            self._context = ssl.create_default_context(cafile=options.ssl_ca_cert_file)
            if options.ssl_insecure:
                self._context.check_hostname = False
                self._context.verify_mode = ssl.CERT_NONE

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = Request(self._base + path, data, headers, method=method)
        try:
            with urlopen(request, timeout=TIMEOUT_S, context=self._context) as answer:
                text = answer.read().decode()
        except HTTPError as error:
            stop(f"{error.code} {error.reason}: {_reason(error.read().decode(errors='replace'))}")
        except (URLError, OSError) as error:
            stop(f"could not connect to {self._base}: {error}")
        return json.loads(text) if text else None


def _reason(text: str) -> str:
    try:
        return str(json.loads(text).get("reason", text))
    except (ValueError, AttributeError):
        return text


def filled(path: str, values: Json) -> str:
    escaped = {name: quote(str(value), safe="") for name, value in values.items()}
    try:
        return path.format(**escaped)
    except KeyError as error:
        stop(f"missing: {error.args[0]}")


# Output


def value_at(row: Any, column: str) -> str:
    found = row
    for part in column.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    if found is None:
        return ""
    return found if isinstance(found, str) else json.dumps(found)


def show(rows: list[Json], columns: list[str], options: argparse.Namespace) -> None:
    if options.sort:
        rows = sorted(rows, key=lambda row: value_at(row, options.sort), reverse=options.sort_reverse)
    if options.format in ("raw_json", "pretty_json"):
        print(json.dumps(rows, indent=2 if options.format == "pretty_json" else None))
        return
    cells = [[value_at(row, column) for column in columns] for row in rows]
    if options.format == "bash":
        print(" ".join(row[0] for row in cells))
    elif options.format == "tsv":
        for line in [columns, *cells]:
            print("\t".join(line))
    elif options.format in ("long", "kvp"):
        for row in cells:
            fields = [f"{name}={json.dumps(value)}" for name, value in zip(columns, row, strict=True)]
            print(" ".join(fields) if options.format == "kvp" else "\n".join(fields) + "\n")
    elif not cells:
        print("No items")
    else:
        table(columns, cells)


def table(columns: list[str], cells: list[list[str]]) -> None:
    widths = [max(len(line[at]) for line in [columns, *cells]) for at in range(len(columns))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    print(rule)
    for number, line in enumerate([columns, *cells]):
        print("| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |")
        if number == 0:
            print(rule)
    print(rule)


# Verbs


def list_(client: Client, words: list[str], options: argparse.Namespace) -> None:
    if not words or words[0] not in LISTS:
        stop(f"list what? One of: {', '.join(LISTS)}")
    path, takes_vhost, columns = LISTS[words[0]]
    if options.vhost is not None and takes_vhost:
        path += "/" + quote(options.vhost, safe="")
    show(client.call("GET", path), words[1:] or list(columns), options)


def show_(client: Client, words: list[str], options: argparse.Namespace) -> None:
    if not words or words[0] != "overview":
        stop("show what? overview")
    columns = words[1:] or ["rabbitmq_version", "cluster_name", "queue_totals.messages", "object_totals.queues"]
    show([client.call("GET", "/overview")], columns, options)


def declare(client: Client, words: list[str], options: argparse.Namespace) -> None:
    name, rest = noun_of(words, "declare")
    noun = NOUNS[name]
    values = arguments_of(rest, noun.required, noun.optional)
    body = {key: value for key, value in values.items() if key != "vhost"}
    client.call(noun.method, _path(noun.path, values, options), body)
    say(f"{name} declared", options)


def delete(client: Client, words: list[str], options: argparse.Namespace) -> None:
    name, rest = noun_of(words, "delete")
    noun = NOUNS[name]
    values = {"destination_type": "queue", "properties_key": "~", **pairs_of(rest)}
    client.call("DELETE", _path(noun.delete_path or noun.path, values, options))
    say(f"{name} deleted", options)


def _path(path: str, values: Json, options: argparse.Namespace) -> str:
    kind = str(values.get("destination_type", ""))[:1]  # q or e
    return filled(path, {"vhost": options.vhost or "/", **values, "destination_type": kind})


def publish(client: Client, words: list[str], options: argparse.Namespace) -> None:
    known: Json = {"exchange": "amq.default", "payload": None, "properties": {}, "payload_encoding": "string"}
    values = arguments_of(words, ("routing_key",), known)
    if "payload" not in values:
        values["payload"] = sys.stdin.read()
    answer = client.call("POST", _path("/exchanges/{vhost}/{exchange}/publish", values, options), values)
    say("Message published" if answer["routed"] else "Message published but NOT routed", options)


def get(client: Client, words: list[str], options: argparse.Namespace) -> None:
    known: Json = {"count": 1, "ackmode": "ack_requeue_true", "payload_file": None, "encoding": "auto"}
    values = arguments_of(words, ("queue",), known)
    found = client.call("POST", _path("/queues/{vhost}/{queue}/get", values, options), values)
    if values.get("payload_file") and found:
        data = found[0]["payload"]
        is_text = found[0]["payload_encoding"] == "string"
        Path(values["payload_file"]).write_bytes(data.encode() if is_text else base64.b64decode(data))
    show(found, ["routing_key", "exchange", "message_count", "payload", "payload_bytes", "redelivered"], options)


def purge(client: Client, words: list[str], options: argparse.Namespace) -> None:
    values = arguments_of(words[1:] if words[:1] == ["queue"] else words, ("name",), {})
    client.call("DELETE", _path("/queues/{vhost}/{name}/contents", values, options))
    say("queue purged", options)


def close(client: Client, words: list[str], options: argparse.Namespace) -> None:
    values = arguments_of(words[1:] if words[:1] == ["connection"] else words, ("name",), {})
    client.call("DELETE", filled("/connections/{name}", values))
    say("connection closed", options)


def _definitions(options: argparse.Namespace) -> str:
    return "/definitions" + ("/" + quote(options.vhost, safe="") if options.vhost is not None else "")


def export(client: Client, words: list[str], options: argparse.Namespace) -> None:
    if len(words) != 1:
        stop("export needs the name of a file")
    Path(words[0]).write_text(json.dumps(client.call("GET", _definitions(options)), indent=2))
    say(f"Exported definitions to {words[0]!r}", options)


def import_(client: Client, words: list[str], options: argparse.Namespace) -> None:
    if len(words) != 1:
        stop("import needs the name of a file")
    try:
        document = json.loads(Path(words[0]).read_text())
    except (OSError, ValueError) as error:
        stop(f"cannot read {words[0]!r}: {error}")
    client.call("POST", _definitions(options), document)
    say(f"Uploaded definitions from {words[0]!r}", options)


def help_(client: Client, words: list[str], options: argparse.Namespace) -> None:
    print("list " + "|".join(LISTS) + " [COLUMN...]\nshow overview [COLUMN...]")
    for name, noun in NOUNS.items():
        print(
            f"declare {name} " + " ".join([f"{n}=..." for n in noun.required] + [f"[{n}=...]" for n in noun.optional])
        )
        print(f"delete {name} NAME=VALUE...")
    print("publish routing_key=... [exchange=...] [payload=...] [properties=...] [payload_encoding=...]")
    print("get queue=... [count=...] [ackmode=...] [payload_file=...]\npurge queue name=...\nclose connection name=...")
    print("export FILE\nimport FILE")


VERBS = {
    "list": list_,
    "show": show_,
    "declare": declare,
    "delete": delete,
    "publish": publish,
    "get": get,
    "purge": purge,
    "close": close,
    "export": export,
    "import": import_,
    "help": help_,
}


def say(text: str, options: argparse.Namespace) -> None:
    if not options.quiet:
        print(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="rabbitmqadmin", description=__doc__, add_help=True, conflict_handler="resolve")
    made.add_argument("-H", "--host", default="localhost")
    made.add_argument("-P", "--port", default=15672, type=int)
    made.add_argument("--path-prefix", default="")
    made.add_argument("-V", "--vhost", help="default: all vhosts for lists and definitions, / for everything else")
    made.add_argument("-u", "--username", default="guest")
    made.add_argument("-p", "--password", default="guest")
    made.add_argument("-s", "--ssl", action="store_true", help="use TLS")
    made.add_argument("--ssl-ca-cert-file")
    made.add_argument("-k", "--ssl-insecure", action="store_true", help="do not verify the certificate")
    made.add_argument("-q", "--quiet", action="store_true")
    formats = ["table", "tsv", "long", "kvp", "bash", "raw_json", "pretty_json"]
    made.add_argument("-f", "--format", default="table", choices=formats)
    made.add_argument("-S", "--sort", metavar="COLUMN")
    made.add_argument("-R", "--sort-reverse", action="store_true")
    made.add_argument("verb", choices=[*VERBS])
    made.add_argument("words", nargs="*", metavar="argument")
    return made


def main() -> None:
    options = parser().parse_intermixed_args()
    VERBS[options.verb](Client(options), options.words, options)


if __name__ == "__main__":
    main()
