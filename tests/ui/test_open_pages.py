"""Changes while a page is open: shrinking lists, revoked permissions, double clicks, long searches."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace.broker.access.permissions import EVERYTHING
from headrace.broker.standbys import Standbys
from headrace.broker.streams.browse import browse as browse_stream
from headrace.listeners.http.management import browse
from tests.listeners.api.conftest import Served
from tests.listeners.api.test_api import post, put_queue
from tests.listeners.api.test_dead_letters import kill_all, make_mortal
from tests.listeners.api.test_readers import rot
from tests.ui.conftest import View

HIDDEN = """
Object.defineProperty(document, "visibilityState", { value: "hidden", configurable: true });
document.dispatchEvent(new Event("visibilitychange"));
"""
PASSWORD = "correct horse battery staple"


def test_a_list_that_got_shorter_shows_its_last_page(live: Served, view: View) -> None:
    for number in range(55):
        put_queue(live, f"shrink-{number:02d}")
    page = view.open("streams?filter=shrink-&page=2")
    page.get_by_role("link", name="shrink-54").wait_for()
    for number in range(10, 55):
        live.request("DELETE", f"/api/queues/%2F/shrink-{number}")
    page.get_by_role("link", name="shrink-00").wait_for()
    assert page.locator(".banner.bad").count() == 0
    view.forgive("status of 400")  # of the page that no longer exists


def test_numbers_that_javascript_would_round_are_shown_as_they_are(live: Served, view: View) -> None:
    put_queue(live, "exact")
    payload = '{"id":12345678901234567890,"price":1.0,"same":1,"same":2,"empty":{},"none":[ ],"s":"a\\"{b}, [c]: 1"}'
    post(live, "exact", payload, headers={"snowflake": 9007199254740993})
    page = view.open("stream/%2F/exact/messages")
    page.locator(".message-line").first.click()
    shown = page.locator(".payload").inner_text()
    assert shown.splitlines() == [
        "{",
        '  "id": 12345678901234567890,',
        '  "price": 1.0,',
        '  "same": 1,',
        '  "same": 2,',
        '  "empty": {},',
        '  "none": [],',
        '  "s": "a\\"{b}, [c]: 1"',
        "}",
    ]
    assert page.locator(".message-body dd", has_text="9007199254740993").count() == 1
    with page.expect_response("**/exact/stream"):
        page.get_by_role("button", name="Follow live").click()
    post(live, "exact", payload, headers={"snowflake": 9007199254740995})
    page.locator(".message-line").first.click()
    page.locator(".message-body dd", has_text="9007199254740995").wait_for()


def test_a_message_of_only_brackets_is_indented(live: Served, view: View) -> None:
    put_queue(live, "brackets")
    post(live, "brackets", "[" * 30_000 + "]" * 30_000)
    page = view.open("stream/%2F/brackets/messages")
    page.locator(".message-line").first.click()
    view.until("document.querySelector('.payload')?.textContent.includes('[]')")


def test_a_user_who_loses_access_is_told_so(browser: Any, tmp_path: Path) -> None:
    live = Served(tmp_path / "data")
    users = live.broker.users
    live.call(users.put_user("leaving", password=PASSWORD, tags=["management"]))
    live.call(users.set_permission("/", "leaving", EVERYTHING))
    live.call(users.remove_user("guest"))
    try:
        credentials = {"username": "leaving", "password": PASSWORD}
        view = View(browser.new_context(http_credentials=credentials), live.base)
        view.open("streams")
        view.sees("live")
        live.call(users.put_user("leaving", tags=[]))
        view.sees("You may not use the dashboard.")
        assert view.page.locator("nav.side").count() == 0
        view.page.context.close()
    finally:
        live.stop()


def test_a_proxy_without_its_broker_is_not_taken_for_a_refused_login(live: Served, view: View) -> None:
    view.page.route("**/api/whoami", lambda route: route.fulfill(status=502, body="Bad Gateway"))
    view.open("streams")
    view.sees("live")
    assert view.page.get_by_text("You are not logged in.").count() == 0
    view.forgive("status of 502")


def test_an_error_is_shown_inside_its_dialog(live: Served, view: View) -> None:
    page = view.page
    page.set_viewport_size({"width": 400, "height": 800})
    view.open("streams")
    page.get_by_role("button", name="New queue or topic").click()
    page.locator("dialog").get_by_label("Name").fill("amq.reserved")
    page.get_by_role("button", name="Create").click()
    page.locator("dialog .toast").wait_for()
    box = page.locator("dialog .toast").bounding_box()
    middle = f"{box['x'] + box['width'] / 2}, {box['y'] + box['height'] / 2}"
    assert page.evaluate(f"document.elementFromPoint({middle}).closest('.toast') !== null")
    view.forgive("status of 4")


def test_the_focus_returns_to_the_opener_of_a_dialog(live: Served, view: View) -> None:
    put_queue(live, "focused")
    page = view.open("stream/%2F/focused")
    button = page.get_by_role("button", name="Delete")
    leaves: list[Callable[[], None]] = [
        lambda: page.keyboard.press("Escape"),
        lambda: page.get_by_role("button", name="Cancel").click(),
    ]
    for leave in leaves:
        button.focus()
        page.keyboard.press("Enter")
        page.locator("dialog[open]").wait_for()
        leave()
        page.locator("dialog").wait_for(state="detached")
        view.until("document.activeElement.innerText === 'Delete'")


def test_the_filter_field_matches_the_list(live: Served, view: View) -> None:
    put_queue(live, "unfiltered")
    page = view.open("streams?filter=nothing-like-it")
    view.sees("No matches.")
    page.get_by_role("link", name="Queues and topics", exact=True).click()
    page.get_by_role("link", name="unfiltered").wait_for()
    assert page.get_by_label("Filter by name").input_value() == ""


@pytest.mark.parametrize("path", ["readers", "connections"])
def test_an_empty_filter_result_is_not_shown_as_an_empty_broker(live: Served, view: View, path: str) -> None:
    view.open(f"{path}?filter=nothing-like-it")
    view.sees("No matches.")


def test_switching_between_channels_and_connections_works(live: Served, view: View, amqp: Any) -> None:
    page = view.open("connections")
    page.get_by_role("columnheader", name="Protocol").wait_for()
    page.get_by_role("button", name="Channels").click()
    page.get_by_role("columnheader", name="Unconfirmed").wait_for()
    page.get_by_role("button", name="Connections").click()
    page.get_by_role("columnheader", name="Protocol").wait_for()
    page.get_by_text("AMQP 0-9-1").first.wait_for()


def test_a_search_by_key_continues_to_the_end(live: Served, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browse, "browse", functools.partial(browse_stream, scan_max=5))
    live.create("far")
    for number in range(12):
        live.publish("far", {"key": "rare" if number == 11 else "usual", "value": str(number)})
    page = view.open("stream/%2F/far/messages?from=key&at=rare")
    for reached in (10, 12):  # until then the button belongs to the previous page
        page.get_by_role("button", name="Continue").click()
        view.sees(f"scanned to offset {reached} of 12")
    view.until("document.querySelector('.message .offset')?.innerText === '0:11'")
    page.get_by_role("button", name="Back to the start").click()
    view.sees("No messages found.")


def test_a_double_click_resets_offsets_once(live: Served, view: View) -> None:
    live.create("moved")
    live.publish("moved", *({"value": str(n)} for n in range(10)))
    live.request("PUT", "/cursors/mover", json={"topic": "moved", "partitions": [{"partition": 0, "offset": 1}]})
    page = view.open("reader/cursor/mover")
    page.get_by_label("To", exact=True).select_option("shift")
    page.get_by_label("Value", exact=True).fill("3")
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Reset offsets").dblclick()
    view.sees("Offsets reset.")
    page.get_by_role("button", name="Reset offsets").wait_for(state="detached")
    (topic,) = live.get("/cursors/mover").json()["topics"]
    assert topic["partitions"][0]["offset"] == 4


def test_a_double_click_publishes_once(live: Served, view: View) -> None:
    put_queue(live, "once")
    page = view.open("stream/%2F/once/publish")
    held: list[Any] = []
    page.route("**/amq.default/publish", lambda route: held.append(route))  # released after both clicks
    with page.expect_request("**/amq.default/publish"):
        page.get_by_role("button", name="Publish").dblclick()
    while not held:  # the request is reported before it is held
        view.until("document.querySelector('button[type=submit]').disabled")
    for route in held:
        route.continue_()
    view.sees("Published.")
    assert len(held) == 1


def test_following_a_deleted_queue_ends_with_a_message(live: Served, view: View) -> None:
    put_queue(live, "short-lived")
    page = view.open("stream/%2F/short-lived/messages")
    with page.expect_response("**/short-lived/stream"):
        page.get_by_role("button", name="Follow live").click()
    page.get_by_role("button", name="Stop following").wait_for()
    live.request("DELETE", "/api/queues/%2F/short-lived")
    page.get_by_role("button", name="Follow live").wait_for()
    page.locator(".toast.bad").first.wait_for()
    page.goto("about:blank")  # it would keep requesting what is deleted now
    view.forgive("status of 404")


def test_malformed_json_is_not_published_or_reported_as_published(live: Served, view: View) -> None:
    put_queue(live, "not-json")
    page = view.open("stream/%2F/not-json/publish")
    page.get_by_label("Headers").fill("{")
    page.get_by_role("button", name="Publish").click()
    view.sees("Headers is not valid JSON.")
    assert page.get_by_text("Published.").count() == 0
    view.open("streams")
    page.get_by_role("button", name="New queue or topic").click()
    page.locator("dialog").get_by_label("Name").fill("not-made")
    page.locator("dialog").get_by_label("Arguments").fill("{")
    page.get_by_role("button", name="Create").click()
    view.sees("Arguments is not valid JSON.")
    assert page.locator("dialog[open]").count() == 1 and page.get_by_text("Created.").count() == 0


def test_hidden_tabs_free_their_connection(live: Served, view: View) -> None:
    """A browser has six connections per host, and each open event stream takes one."""
    for number in range(9):
        if number < 7:
            view.open("overview")
            view.sees("live")
        else:  # opened in the background
            view.page.add_init_script(HIDDEN)
            view.open("overview")
            view.sees("Messages per second")
        view.page.evaluate(HIDDEN)
        view = View(view.page.context, live.base)
    first = view.page.context.pages[0]
    with first.expect_response("**/overview/stream"):
        first.evaluate(HIDDEN.replace('"hidden"', '"visible"'))
    first.get_by_role("button", name="live").wait_for()


def test_a_queue_whose_name_cannot_be_typed_is_deleted(live: Served, view: View) -> None:
    name = "two\nlines\tand  more "
    live.request("PUT", f"/api/queues/%2F/{quote(name)}", json={})
    page = view.open(f"stream/%2F/{quote(name)}")
    page.get_by_role("button", name="Delete").click()
    delete = page.locator("dialog").get_by_role("button", name="Delete")
    assert delete.is_disabled()
    page.locator("dialog input").press_sequentially("two lines and more")
    with page.expect_response(lambda answer: answer.request.method == "DELETE") as deleted:
        delete.click()
    assert deleted.value.status == 204
    view.until("location.hash === '#/streams'")
    view.forgive("status of 404")  # the page may have requested the deleted queue once more


def test_dead_letters_without_an_origin_cannot_be_filtered(live: Served, view: View) -> None:
    make_mortal(live, "chosen")
    post(live, "chosen", "died")
    kill_all(live, "chosen")
    post(live, "chosen.dead", "published here")
    page = view.open("dead-letter/%2F/chosen.dead")
    rows = page.get_by_role("region", name="Dead letters by origin and reason").locator("tbody tr")
    choose = page.get_by_role("button", name="Filter")
    rows.filter(has_text="rejected").filter(has=choose).wait_for()
    assert rows.filter(has_text="published here directly").filter(has=choose).count() == 0, "it would choose all"


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_of_dots_gets_an_explanation(live: Served, view: View, amqp: Any, name: str) -> None:
    amqp.queue_declare(name, durable=True)
    page = view.open("streams")
    page.get_by_role("link", name=name, exact=True).click()
    view.sees("A browser cannot address a name that is only dots")
    amqp.queue_delete(name)


def test_damage_is_shown_in_place_among_the_messages(live: Served, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        live.publish("rotten", {"value": f"value {number}"})
    rot(live, monkeypatch, "rotten", range(3, 5))
    for order, shown in (("oldest", [0, 1, 2, 3, 5, 6, 7]), ("newest", [7, 6, 5, 3, 2, 1, 0])):
        page = view.open(f"stream/%2F/rotten/messages?from={order}")
        page.locator(".message.gap").wait_for()
        lines = page.locator("ol.messages > li").all_inner_texts()
        assert [("gap" if "cannot be read" in line else line.split()[0]) for line in lines] == [
            "gap" if offset == 3 else f"0:{offset}" for offset in shown
        ]
        text = page.locator(".message.gap").inner_text()
        assert "Offsets 3 to 4 cannot be read. a file is damaged at byte 1,234: a test." in text
        assert "Reading continues at offset 5." in text
    assert page.locator(".banner.bad").count() == 0


def test_the_overview_shows_standbys(live: Served, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    live.publish("anything", {"value": "so that there is something to see"})
    numbers = {"seconds_behind": 0.42, "copied_bytes": 1 << 20, "copy_bytes": 4 << 20}
    second, third = {"name": "second", "state": "in step"}, {"name": "third", "state": "copying"}
    monkeypatch.setattr(Standbys, "describe", lambda _: {"standbys": [second | numbers, third | numbers]})
    page = view.open("overview")
    shown = page.locator("dt", has_text="Standbys").locator("xpath=following-sibling::dd[1]")
    assert shown.inner_text().splitlines() == ["second in sync, 0.4 s behind", "third copying, 1 MB of 4 MB"]
    monkeypatch.undo()
    page.locator("dt", has_text="Standbys").wait_for(state="detached")
