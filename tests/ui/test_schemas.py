"""The dashboard's schema pages, and the last message of a key, in Chromium."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace.broker.access.permissions import Permission
from headrace.broker.schemas.topic import TOPIC
from tests.listeners.api.conftest import Served
from tests.ui.conftest import HOSTILE, View

PASSWORD = "a password of a test"
HOSTILE_NAME = "".join(character for character in HOSTILE if character.isprintable())
PERSON = '{"type":"record","name":"people.Person","fields":[]}'
ORDER = '{"type":"record","name":"Order","fields":[{"name":"who","type":"people.Person"},{"name":"n","type":"long"}]}'


def register(live: Served, subject: str, schema: str, **more: Any) -> None:
    path = f"/registry/subjects/{quote(subject, safe='')}/versions"
    live.request("POST", path, json={"schema": schema, **more}).raise_for_status()


def go_on(view: View, path: str, heading: str) -> None:
    """Opens another page and waits for it: the previous page may have buttons of the same names."""
    view.open(path)
    view.until(f"document.querySelector('main h1').innerText === '{heading}'")


def level(live: Served, subject: str) -> Any:
    return live.get(f"/registry/config/{subject}").json().get("compatibilityLevel")


def test_without_schemas_the_page_shows_how_to_start(view: View) -> None:
    view.open("overview")
    view.press("g", "h")
    view.sees("No schemas yet.")
    view.sees("headrace schema register")


def test_subjects_are_listed_and_schemas_shown_with_references(live: Served, view: View) -> None:
    register(live, "person", PERSON)
    register(live, "a/order", ORDER, references=[{"name": "people.Person", "subject": "person", "version": 1}])
    register(live, "money", 'syntax = "proto3"; message Money { int64 units = 1; }', schemaType="PROTOBUF")
    page = view.open("schemas")
    row = page.locator("tbody tr", has_text="money")
    row.wait_for()
    assert row.locator("td").all_inner_texts()[1:3] == ["PROTOBUF", "1"]
    assert "BACKWARD" in row.inner_text()
    page.get_by_role("link", name="a/order").click()
    text = page.locator(".payload")
    text.wait_for()
    assert text.inner_text().splitlines()[:3] == ["{", '  "type": "record",', '  "name": "Order",']
    page.locator("dl").get_by_role("link", name="person").click()
    view.until("document.querySelector('main h1').innerText === 'person'")
    page.locator("dl", has_text="referenced by").get_by_role("link", name="a/order").wait_for()
    view.open("schema/money")
    view.sees("int64 units = 1;")


def test_compatibility_is_set_per_subject_and_globally(live: Served, view: View) -> None:
    register(live, "levelled", '"string"')
    page = view.open("schema/levelled")
    page.get_by_role("button", name="Set compatibility").click()
    page.get_by_label("Level").select_option("FULL")
    page.get_by_role("button", name="Set", exact=True).click()
    view.until("!document.querySelector('dialog')")
    assert level(live, "levelled") == "FULL"
    go_on(view, "schemas", "Schemas")
    page.get_by_role("button", name="Set compatibility").click()
    page.get_by_label("Level").select_option("NONE")
    page.get_by_role("button", name="Set", exact=True).click()
    page.locator(".head .badge", has_text="NONE").wait_for()
    go_on(view, "schema/levelled", "levelled")
    page.get_by_role("button", name="Set compatibility").click()
    page.get_by_label("Level").select_option("default (NONE)")
    page.get_by_role("button", name="Set", exact=True).click()
    view.sees("(default)")
    assert level(live, "levelled") is None
    live.request("DELETE", "/registry/config")


def test_versions_and_subjects_are_deleted_softly_then_permanently(live: Served, view: View) -> None:
    register(live, "leaving", '"int"')
    register(live, "leaving", '"long"')
    page = view.open("schema/leaving?version=1")
    view.sees('"int"')
    page.get_by_role("button", name="Delete version 1").click()
    page.locator("dialog").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete version 1 permanently").wait_for()
    assert live.get("/registry/subjects/leaving/versions").json() == [2]
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("dialog").get_by_role("button", name="Delete").click()
    view.until("document.querySelector('main h1').innerText === 'Schemas'")
    assert "leaving" not in live.get("/registry/subjects").json()
    page.get_by_label("show deleted").check()
    page.get_by_role("link", name="leaving").click()
    page.get_by_role("button", name="Delete permanently", exact=True).click()
    confirm = page.locator("dialog").get_by_role("button", name="Delete permanently")
    assert confirm.is_disabled()
    page.locator("dialog input").fill("leaving")
    confirm.click()
    view.until("document.querySelector('main h1').innerText === 'Schemas'")
    assert live.get("/registry/subjects?deleted=true").json().count("leaving") == 0
    # The page may have requested the deleted subject once more, and the browser reports the 404.
    view.forgive("status of 404")


def test_deleting_a_referenced_schema_shows_the_reason(live: Served, view: View) -> None:
    register(live, "needed", PERSON)
    register(live, "needing", ORDER, references=[{"name": "people.Person", "subject": "needed", "version": 1}])
    page = view.open("schema/needed")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("dialog").get_by_role("button", name="Delete").click()
    page.locator("dialog .toast.bad", has_text="references exist").wait_for()
    view.forgive("status of 422")


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
def test_hostile_schemas_stay_text_and_within_the_window(live: Served, view: View, width: int) -> None:
    register(live, HOSTILE_NAME, json.dumps({"type": "record", "name": "H", "doc": HOSTILE, "fields": []}))
    needs = [{"name": HOSTILE_NAME, "subject": HOSTILE_NAME, "version": 1}]
    register(live, "needs-" + "long-" * 30, '"string"', references=needs)
    page = view.page
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme="dark")
    view.open("schemas")
    page.get_by_role("link", name="needs-long-").click()
    page.locator("dl").get_by_role("link", name="onerror").click()
    page.locator(".payload", has_text="onerror").wait_for()
    page.locator("dl").get_by_role("link", name="needs-long-").wait_for()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("dialog").get_by_text("onerror").first.wait_for()
    assert page.evaluate("document.title") != "owned"
    assert page.locator("main img").count() == 0 and page.locator("main script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_last_message_of_a_key_can_be_found_with_an_index(live: Served, view: View) -> None:
    live.create("plain")
    live.create("customers", partitions=3, key_index="true")
    live.publish("customers", *({"key": f"customer-{n % 5}", "value": f"value {n}"} for n in range(20)))
    page = view.open("stream/%2F/customers/messages")
    page.get_by_label("Start at").select_option("last of key")
    view.sees("Enter a key.")
    page.get_by_label("Where").fill("customer-3")
    page.keyboard.press("Enter")
    view.until("[...document.querySelectorAll('.message .preview')].map(m => m.innerText).join() === 'value 18'")
    live.publish("customers", {"key": "customer-3", "value": "newer"})
    view.sees("newer")
    page.get_by_label("Where").fill("nobody")
    page.keyboard.press("Enter")
    view.sees("No message with this key.")
    go_on(view, "stream/%2F/plain/messages", "plain")
    page.get_by_label("Start at").wait_for()
    assert page.get_by_label("Start at").locator("option").all_inner_texts()[-1] == "with key"


def test_read_only_users_see_no_buttons_for_changes(browser: Any, tmp_path: Path) -> None:
    live = Served(tmp_path / "data")
    register(live, "seen", '"string"')
    users = live.broker.users
    for name, read in (("looker", f"^{TOPIC}$"), ("stranger", "")):
        live.call(users.put_user(name, password=PASSWORD, tags=["management"]))
        live.call(users.set_permission("/", name, Permission(configure="", write="", read=read)))
    live.call(users.remove_user("guest"))
    try:
        for name, text in (("looker", "seen"), ("stranger", TOPIC)):
            credentials = {"username": name, "password": PASSWORD}
            view = View(browser.new_context(http_credentials=credentials), live.base)
            page = view.open("schemas")
            page.locator("main").get_by_text(text).first.wait_for()
            if name == "looker":
                view.sees("default compatibility")
                assert page.get_by_role("button", name="Set compatibility").count() == 0
                view.open("schema/seen")
                page.locator(".payload").wait_for()
                assert page.get_by_role("button", name="Delete").count() == 0
            page.context.close()
    finally:
        live.stop()
