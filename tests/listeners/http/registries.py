"""Helpers for tests of the schema registry."""

import json
from typing import Any

import httpx

from tests.listeners.http.live import Live

MEDIA = "application/vnd.schemaregistry.v1+json"
STRING, INT, LONG = '"string"', '"int"', '"long"'


def record(*fields: tuple[str, Any], **defaults: Any) -> str:
    listed = [{"name": name, "type": kind} for name, kind in fields]
    for one in listed:
        if one["name"] in defaults:
            one["default"] = defaults[one["name"]]
    return json.dumps({"type": "record", "name": "r", "fields": listed}, separators=(",", ":"))


ONE = record(("a", "int"))
TWO = record(("a", "int"), ("b", "string"), b="")
BROKEN = record(("a", "int"), ("b", "string"))


class Registry:
    def __init__(self, live: Live, auth: tuple[str, str] | None = None) -> None:
        self._live, self._auth = live, auth

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> httpx.Response:
        headers = {"content-type": MEDIA} if body is not None else {}
        content = None if body is None else json.dumps(body)
        return self._live.client.request(
            method, f"/registry{path}", content=content, headers=headers, params=query, auth=self._auth
        )

    def ok(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        answer = self.ask(method, path, body, **query)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == MEDIA
        return answer.json()

    def code(self, method: str, path: str, body: Any = None, **query: Any) -> int:
        answer = self.ask(method, path, body, **query)
        found = answer.json()
        assert found.keys() == {"error_code", "message"}
        code: int = found["error_code"]
        assert answer.status_code == (code if code < 1000 else code // 100)
        return code

    def register(self, subject: str, schema: str, **more: Any) -> int:
        made: int = self.ok("POST", f"/subjects/{subject}/versions", {"schema": schema, **more})["id"]
        return made

    def versions(self, subject: str, **query: Any) -> list[int]:
        found: list[int] = self.ok("GET", f"/subjects/{subject}/versions", **query)
        return found
