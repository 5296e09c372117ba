"""The dashboard in Chromium: pages, live updates, destructive actions, hostile names, a lost connection."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Address
from headrace.listeners.http.ui import files
from tests.listeners.api.conftest import Served
from tests.listeners.api.test_api import depth, only_one, post, put_queue
from tests.listeners.api.test_dead_letters import kill_all, make_mortal
from tests.ports import free_port
from tests.ui.conftest import HOSTILE, PATIENCE_S, View, copied_as_curl

PAGES = {
    "overview": "Overview",
    "streams": "Queues and topics",
    "readers": "Consumer groups",
    "dead-letters": "Dead letters",
    "pipelines": "Pipelines",
    "schemas": "Schemas",
    "connections": "Connections",
    "policies": "Policies",
    "users": "Users",
    "settings": "Settings",
}


def test_an_empty_broker_shows_how_to_start(live: Served, view: View) -> None:
    view.open("overview")
    view.sees("No queues or topics yet")
    view.sees("import pika")
    overview = live.get("/api/headrace/overview").json()
    assert overview["connections"] == 0, "the dashboard itself is not counted"
    for page, text in {
        "streams": "No queues or topics yet",
        "readers": "No consumer groups or cursors",
        "dead-letters": "No queue has a dead-letter exchange",
        "pipelines": "No pipeline has reported",
        "connections": "No connections",
        "policies": "No policies",
    }.items():
        view.open(page)
        view.sees(text)
    view.open("nowhere")
    view.sees("Page not found")
    view.open("readers")
    view.sees(f"kcat -b {overview['addresses']['kafka'][0]} -G")
    view.sees(f'.option("bootstrap", "{live.base}")')


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
def test_every_page_opens_by_its_address_and_fits_the_window(live: Served, view: View, width: int) -> None:
    put_queue(live, "fits")
    post(live, "fits", "x" * 400)
    page = view.page
    page.set_viewport_size({"width": width, "height": 800})
    inner = ("stream/%2F/fits", "stream/%2F/fits/messages", "stream/%2F/fits/publish", "dead-letter/%2F/fits")
    for path in (*PAGES, *inner):
        view.open(path)
        view.until("!document.querySelector('main').innerText.includes('Loading.')")
        heading = page.locator("main h1").first.inner_text()
        assert heading == PAGES.get(path, "fits")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than the window"


def test_numbers_are_live(live: Served, view: View, amqp: Any) -> None:
    put_queue(live, "lively")
    page = view.open("stream/%2F/lively")
    ready = page.locator(".tile", has_text="Ready").locator(".tile-value")
    assert ready.inner_text() == "0"
    for number in range(7):
        amqp.basic_publish("", "lively", str(number).encode())
    view.until("[...document.querySelectorAll('.tile')].some(t => /^Ready\\s+7$/.test(t.innerText.trim()))")
    view.open("overview")
    page.wait_for_selector(".uplot canvas")
    view.sees("live")


def test_live_updates_can_be_paused(live: Served, view: View) -> None:
    put_queue(live, "paused")
    page = view.open("stream/%2F/paused")
    page.get_by_role("button", name="live").click()
    view.sees("paused")


def test_streams_are_filtered_sorted_and_linked(live: Served, view: View) -> None:
    for number in range(60):
        put_queue(live, f"many-{number:02d}")
    post(live, "many-33", "x")
    page = view.open("streams")
    page.keyboard.press("/")
    page.keyboard.type("many-")
    view.until("location.hash.includes('filter=many-')")  # until then the list is unfiltered
    view.sees("page 1 of 2")
    page.get_by_role("button", name="Next").click()
    page.get_by_role("link", name="many-59").wait_for()
    page.goto(f"{live.base}/#/streams?filter=many-&sort=ready&reverse=1")
    page.reload()
    view.until("document.querySelector('tbody tr td a')?.innerText === 'many-33'")
    page.get_by_role("link", name="many-33").click()
    view.until("document.querySelector('main h1').innerText === 'many-33'")


def test_a_queue_is_created_and_published_to(live: Served, view: View) -> None:
    page = view.open("streams")
    page.get_by_role("button", name="New queue or topic").click()
    page.locator("dialog").get_by_label("Name").fill("made-here")
    page.locator("dialog").get_by_label("Arguments").fill('{"x-max-length": 5}')
    page.get_by_role("button", name="Create").click()
    view.until("document.querySelector('main h1').innerText === 'made-here'")
    view.sees("x-max-length")
    page.get_by_role("link", name="Publish").click()
    page.get_by_label("Message").fill('{"a": 1}')
    page.get_by_role("button", name="Publish").click()
    view.sees("Published.")
    assert depth(live, "made-here") == 1


def test_messages_are_shown_as_json_text_and_hex_without_consuming_them(live: Served, view: View) -> None:
    put_queue(live, "shown")
    post(live, "shown", json.dumps({"deep": {"er": [1, 2]}}), correlation_id="c-1", headers={"h": "v"})
    page = view.open("stream/%2F/shown/messages")
    page.locator(".message-line").first.click()
    view.sees("c-1")
    assert '"er": [' in page.locator(".payload").inner_text()
    page.get_by_role("button", name="hex").click()
    assert page.locator(".payload").inner_text().startswith("000000  7b 22")
    queue = live.get("/api/queues/%2F/shown").json()
    assert (queue["messages_ready"], queue["message_stats"]["deliver_get"]) == (1, 0)


def test_copy_as_curl_gives_a_working_command(live: Served, view: View) -> None:
    """Also for a queue in memory, which is not a topic."""
    put_queue(live, "stored")
    assert live.request("PUT", "/api/queues/%2F/fleeting", json={"durable": False}).status_code == 201
    for name, base in (("stored", "/topics/stored"), ("fleeting", "/api/headrace/streams/%2F/fleeting")):
        post(live, name, "v")
        view.open(f"stream/%2F/{name}/messages")
        address = f"{base}/messages?partition=0&offset=0&limit=1"
        assert copied_as_curl(view) == f"curl '{live.base}{address}'"
        assert len(live.get(address).json()["messages"]) == 1


def test_messages_are_found_by_text_key_and_offset(live: Served, view: View) -> None:
    live.create("found")
    live.publish("found", *({"value": f"value {n}", "key": f"key-{n}"} for n in range(80)))
    view.open("stream/%2F/found/messages?contains=value%2041")
    view.until("document.querySelectorAll('.message').length === 1")
    view.open("stream/%2F/found/messages?from=key&at=key-7")
    view.until("document.querySelector('.message .offset')?.innerText === '0:7'")
    view.open("stream/%2F/found/messages?from=offset&at=79")
    view.until("document.querySelector('.message .offset')?.innerText === '0:79'")


def test_new_messages_are_followed(live: Served, view: View) -> None:
    put_queue(live, "followed")
    page = view.open("stream/%2F/followed/messages")
    with page.expect_response(
        "**/followed/stream"
    ):  # the broker starts at the end of the queue at the time of its response
        page.get_by_role("button", name="Follow live").click()
    post(live, "followed", "here it comes")
    view.sees("here it comes")


def test_purging_needs_confirmation(live: Served, view: View) -> None:
    put_queue(live, "purged")
    post(live, "purged", "x")
    page = view.open("stream/%2F/purged")
    page.get_by_role("button", name="Purge").click()
    page.get_by_role("button", name="Cancel").click()
    assert depth(live, "purged") == 1
    page.get_by_role("button", name="Purge").click()
    page.get_by_role("button", name="Purge 1 messages").click()
    view.sees("Purged.")
    assert depth(live, "purged") == 0


def test_deleting_requires_typing_the_name(live: Served, view: View) -> None:
    put_queue(live, "doomed")
    page = view.open("stream/%2F/doomed")
    page.get_by_role("button", name="Delete").click()
    confirm = page.locator("dialog").get_by_role("button", name="Delete")
    assert confirm.is_disabled()
    page.locator("dialog input").fill("doomed")
    confirm.click()
    view.sees("Deleted.")
    assert live.get("/api/queues/%2F/doomed").status_code == 404
    # The page may have requested the deleted queue once more, and the browser reports the 404.
    view.forgive("status of 404")


def test_hostile_names_stay_text(live: Served, view: View, amqp: Any) -> None:
    amqp.queue_declare(HOSTILE, durable=True, arguments={"x-note": HOSTILE})
    amqp.exchange_declare("hostile", "topic")
    amqp.queue_bind(HOSTILE, "hostile", HOSTILE)
    amqp.basic_publish("hostile", HOSTILE, HOSTILE.encode())
    amqp.basic_consume(HOSTILE, lambda *_: None, consumer_tag=HOSTILE)
    flow = {"function": HOSTILE, "sources": [HOSTILE], "stages": [HOSTILE], "sink": HOSTILE, "phases_ms": {HOSTILE: 1}}
    details = {"last_error": HOSTILE, "n": HOSTILE, "flows": {HOSTILE: flow}}
    live.request("PUT", "/pipelines/hostile", json={"state": "failed", "details": details})
    page = view.open("streams?filter=onerror")
    page.get_by_role("link", name="onerror").click()
    view.until("document.querySelector('main h1').innerText.includes('onerror')")
    page.get_by_role("link", name="Messages").click()
    page.locator(".message-line").first.click()
    for path in ("pipelines", "connections", "connections?show=channels", "overview"):
        view.open(path)
        page.wait_for_timeout(200)
    assert page.evaluate("document.title") != "owned"
    assert page.locator("main img").count() == 0 and page.locator("main script").count() == 0
    live.request("DELETE", "/pipelines/hostile")


def test_connections_are_shown_and_closed(live: Served, view: View, amqp: Any) -> None:
    only_one(live)
    page = view.open("connections")
    view.sees("AMQP 0-9-1")
    page.get_by_role("button", name="Close").first.click()
    page.get_by_role("button", name="Close connection").click()
    view.sees("Closed.")
    with pytest.raises(Exception, match=r"CONNECTION_FORCED|320"):
        amqp.connection.process_data_events(time_limit=PATIENCE_S)


def test_offsets_are_reset_after_a_preview(live: Served, view: View) -> None:
    live.create("read")
    live.publish("read", *({"value": str(n)} for n in range(10)))
    body = {"topic": "read", "partitions": [{"partition": 0, "offset": 8}]}
    live.request("PUT", "/cursors/my-job", json=body)
    page = view.open("reader/cursor/my-job")
    view.sees("Reset offsets")
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Reset offsets").wait_for()
    assert live.get("/cursors/my-job").json()["topics"][0]["partitions"][0]["offset"] == 8
    page.get_by_role("button", name="Reset offsets").click()
    view.sees("Offsets reset.")
    assert live.get("/cursors/my-job").json()["topics"][0]["partitions"][0]["offset"] == 0


def test_dead_letters_are_replayed_by_a_click(live: Served, view: View) -> None:
    make_mortal(live, "mortal")
    for number in range(5):
        post(live, "mortal", f"order {number}")
    kill_all(live, "mortal")
    view.open("dead-letters")
    page = view.page
    page.get_by_role("link", name="mortal.dead").click()
    view.sees("rejected by a consumer")
    page.get_by_label("Maximum count").fill("3")
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Replay 3 messages").click()
    view.sees("Replay started.")
    view.sees("3 of 3")
    assert (depth(live, "mortal"), depth(live, "mortal.dead")) == (3, 2)


REVENUE: dict[str, Any] = {  # as the demo's pipeline reported it
    "lag": 12, "input_rows_per_second": 40.5, "rows_per_second": 88.1, "rows_total": 4321, "batch_ms": 712,
    "last_error": None,
    "flows": {
        "revenue": {
            "function": "revenue", "sources": ["orders"], "sink": "revenue",
            "stages": ["select", "filter", "watermark", "aggregate"],
            "batch": 31, "rows": 83, "input_rows_per_second": 40.5, "rows_per_second": 88.1, "batch_ms": 712, "lag": 12,
            "phases_ms": {"addBatch": 600, "latestOffset": 40}, "state_rows": 18,
            "watermark": "2026-01-01T00:00:00.000Z",
        },
        "revenue.dead": {
            "function": "revenue", "sources": ["orders"], "sink": "orders.bad", "stages": ["select", "filter"],
            "dead": True,
            "batch": 30, "rows": 2, "input_rows_per_second": 1.0, "rows_per_second": 2.0, "batch_ms": 300, "lag": 12,
            "phases_ms": {},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
def test_a_pipeline_is_drawn_from_its_source_to_its_sink(live: Served, view: View, width: int) -> None:
    live.create("orders-in")
    report = {**REVENUE, "flows": {name: {**flow, "sources": ["orders-in"]} for name, flow in REVENUE["flows"].items()}}
    live.request("PUT", "/pipelines/revenue", json={"state": "running", "details": report})
    view.page.set_viewport_size({"width": width, "height": 800})
    page = view.open("pipelines")
    drawing = page.get_by_role("figure", name="Flow revenue")
    drawing.wait_for()
    steps = drawing.locator(".flow > li")
    assert [steps.nth(n).locator(".flow-kind").first.inner_text() for n in range(3)] == ["Source", "Function", "Sink"]
    assert drawing.locator(".stages li").all_inner_texts() == ["select", "filter", "watermark", "aggregate"]
    boxes = [steps.nth(n).bounding_box() for n in range(3)]
    lead = "x" if width > 1000 else "y"  # side by side on a desk, one below the other on a phone
    assert [box[lead] for box in boxes] == sorted({box[lead] for box in boxes}), boxes
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "orders.bad" in drawing.locator(".flow-sink.dead").inner_text()
    assert "88.1 rows/s processed, 712 ms per batch" in drawing.inner_text() and "lag 12" in drawing.inner_text()

    drawing.locator("summary").focus()
    page.keyboard.press("Enter")
    drawing.get_by_text("600 ms").wait_for()
    failed = {**report, "last_error": "flow 'revenue' failed: no such column"}
    live.request("PUT", "/pipelines/revenue", json={"state": "failed", "details": failed})
    view.sees("no such column")
    drawing.get_by_role("link", name="orders-in").focus()
    page.keyboard.press("Enter")
    view.until("document.querySelector('main h1').innerText === 'orders-in'")
    page.goto("about:blank")  # it would keep requesting what is deleted now
    live.request("DELETE", "/pipelines/revenue")
    live.request("DELETE", "/topics/orders-in")


def test_pipeline_reports_of_any_shape_are_shown(live: Served, view: View) -> None:
    for number, flows in enumerate(({"x": None}, {"x": "text"}, "text", [1], {"x": {"stages": {"a": 1}, "sources": 3,
                                    "sink": {}, "phases_ms": "12", "lag": "much", "function": None}})):  # fmt: skip
        live.request("PUT", f"/pipelines/odd-{number}", json={"state": "running", "details": {"flows": flows}})
    view.open("pipelines")
    for number in range(5):
        view.sees(f"odd-{number}")
        live.request("DELETE", f"/pipelines/odd-{number}")


@pytest.mark.parametrize(("words", "shown"), [("policy", "policy"), ("operator policy", "operator_policy")])
def test_a_policy_is_created_and_deleted(live: Served, view: View, words: str, shown: str) -> None:
    put_queue(live, "ruled")
    name = "short-" + "x" * 200
    page = view.open("policies")
    page.get_by_role("button", name=f"New {words}").click()
    page.locator("dialog").get_by_label("Name", exact=False).first.fill(name)
    page.get_by_label("Pattern").fill("^ruled$")
    page.get_by_role("button", name="Save").click()
    view.sees("Saved.")
    assert live.get("/api/queues/%2F/ruled").json()[shown] == name
    delete = page.get_by_role("button", name="Delete")
    assert delete.bounding_box()["x"] < 1280, "a long name pushes nothing out of the window"
    delete.click()
    page.locator("dialog").get_by_role("button", name="Delete").click()
    view.sees("Deleted.")
    assert live.get("/api/queues/%2F/ruled").json()[shown] is None


def test_a_lost_connection_is_shown_and_restored(browser: Any, tmp_path: Path) -> None:
    # A fixed port that no outgoing connection is given while the broker is down, least of all one of the page.
    first = Served(tmp_path / "data", http=Address("localhost", free_port()))
    view = View(browser.new_context(), first.base)
    view.open("overview")
    view.sees("live")
    first.stop()
    view.sees("The connection to the broker is lost")
    second = Served(tmp_path / "data", http=Address("localhost", first.port))
    view.page.get_by_text("The connection to the broker is lost").wait_for(state="detached")
    view.page.context.close()
    second.stop()


def test_the_theme_is_chosen_and_remembered(live: Served, view: View) -> None:
    page = view.open("overview")
    light = page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")
    page.get_by_role("button", name="Light or dark theme").click()
    page.reload()
    page.wait_for_selector("main h1")
    assert page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor") != light


def test_keyboard_shortcuts_switch_pages(live: Served, view: View) -> None:
    view.open("overview")
    for key, title in (("s", "Queues and topics"), ("d", "Dead letters"), ("o", "Overview")):
        view.press("g", key)
        view.until(f"document.querySelector('main h1').innerText === '{title}'")


def test_a_second_shortcut_is_not_cancelled_by_the_first(live: Served, view: View) -> None:
    page = view.open("overview")
    view.stop_time()
    for key in ("g", "s"):
        page.keyboard.press(key)
    view.until("document.querySelector('main h1').innerText === 'Queues and topics'")
    page.clock.fast_forward(1000)
    page.keyboard.press("g")
    page.clock.fast_forward(300)  # beyond the timeout of the first shortcut, but not of this one
    page.keyboard.press("d")
    view.until("document.querySelector('main h1').innerText === 'Dead letters'")


def test_navigation_right_after_the_first_render_works(live: Served, view: View) -> None:
    view.page.add_init_script(
        "new MutationObserver((_, seen) => { if (document.querySelector('main h1')) { seen.disconnect();"
        " location.hash = '#/streams'; } }).observe(document, { childList: true, subtree: true })"
    )
    view.open("overview")
    view.until("document.querySelector('main h1').innerText === 'Queues and topics'")


def test_scripts_and_styles_come_from_this_origin_only(live: Served) -> None:
    answer = live.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "<style" not in answer.text and "onclick" not in answer.text
    assert live.get("/ui/app.js", headers={"if-none-match": live.get("/ui/app.js").headers["etag"]}).status_code == 304
    for path in ("/ui/../files.py", "/ui/%2e%2e/files.py", "/ui/nothing.js", "/ui/"):
        assert live.get(path).status_code == 404


def test_without_npm_modules_a_page_explains_what_is_missing(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "VENDOR", ("vendor/not-there.js",))
    answer = live.get("/")
    assert answer.status_code == 200 and "make ui" in answer.text and "script" not in answer.text
