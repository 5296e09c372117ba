"""Exchanges and bindings over the management API: each binding has a name and a URL."""

from typing import Any
from urllib.parse import urljoin

import pytest

from tests.listeners.api.conftest import Served
from tests.listeners.api.test_api import put_queue

KEYS = ("", "~", "%7E", "50%", "a/b c?", "ключ", "line\r\nbreak", "~~")


def make(live: Served, name: str) -> str:
    """The path of the bindings between an exchange and a queue of the same name."""
    put_queue(live, name)
    assert live.request("PUT", f"/api/exchanges/%2F/{name}", json={"type": "headers"}).status_code == 201
    return f"/api/bindings/%2F/e/{name}/q/{name}"


def listed(live: Served, address: str) -> list[tuple[str, dict[str, Any]]]:
    return [(one["routing_key"], one["arguments"]) for one in live.get(address).json()]


def test_the_binding_without_arguments_is_deleted_not_the_one_with(live: Served) -> None:
    address = make(live, "tilde")
    for arguments in ({"a": 1}, {}, {"b": 2}):
        assert live.request("POST", address, json={"arguments": arguments}).status_code == 201
    assert live.request("DELETE", f"{address}/~").status_code == 204
    assert listed(live, address) == [("", {"a": 1}), ("", {"b": 2})]
    assert live.request("DELETE", f"{address}/~").status_code == 404


def test_the_default_exchange_type_is_direct(live: Served) -> None:
    assert live.request("PUT", "/api/exchanges/%2F/plain", json={}).status_code == 201
    assert live.get("/api/exchanges/%2F/plain").json()["type"] == "direct"
    assert live.request("PUT", "/api/exchanges/%2F/plain", json={"type": None}).status_code == 400


def test_bindings_have_unique_names(live: Served) -> None:
    address = make(live, "names")
    for key in KEYS:
        for arguments in ({}, {"a": 1}):
            live.request("POST", address, json={"routing_key": key, "arguments": arguments})
    names = [one["properties_key"] for one in live.get(address).json()]
    assert len(set(names)) == len(names) == 2 * len(KEYS)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("arguments", [{}, {"a": 1}], ids=["plain", "arguments"])
def test_the_location_of_a_new_binding_works(live: Served, key: str, arguments: dict[str, Any]) -> None:
    address = make(live, f"leads-{KEYS.index(key)}-{len(arguments)}")
    made = live.request("POST", address, json={"routing_key": key, "arguments": arguments})
    assert made.status_code == 201
    found = live.get(urljoin(address, made.headers["location"])).json()
    assert (found["routing_key"], found["arguments"]) == (key, arguments)
