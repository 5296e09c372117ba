"""The dashboard's user pages, and the browser's login, in Chromium."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest

from headrace.broker.access.permissions import EVERYTHING
from tests.listeners.amqp.running import patient_connection
from tests.listeners.api.conftest import Served
from tests.ui.conftest import HOSTILE, View, copied_as_curl

PASSWORD = "a password of a test"
HOSTILE_NAME = "".join(character for character in HOSTILE if character.isprintable())


def user(live: Served, name: str) -> Any:
    return live.get(f"/api/users/{name}").json()


def test_a_user_is_created_given_permissions_and_deleted(live: Served, view: View) -> None:
    page = view.open("users")
    view.sees("guest is the only user")
    page.get_by_role("button", name="New user").click()
    dialog = page.locator("dialog")
    dialog.get_by_label("Name").fill("bill")
    dialog.get_by_label("Password").fill(PASSWORD)
    dialog.get_by_label("management").check()
    page.get_by_role("button", name="Create").click()
    view.sees("Created.")
    assert live.get("/api/whoami", auth=("bill", PASSWORD)).json()["tags"] == ["management"]
    assert live.get("/api/permissions/%2F/bill").json()["read"] == ".*"
    view.sees("guest still has its default password")

    page.get_by_role("link", name="bill").click()
    page.get_by_role("button", name="Change tags").click()
    dialog.get_by_label("management").uncheck()
    dialog.get_by_label("policymaker").check()
    dialog.get_by_role("button", name="Change tags").click()
    view.sees("Changed.")
    assert user(live, "bill")["tags"] == ["policymaker"]
    page.get_by_role("button", name="Change password").click()
    dialog.get_by_label("New password").fill("another")
    dialog.get_by_role("button", name="Change password").click()
    view.until("!document.querySelector('dialog')")
    assert live.get("/api/whoami", auth=("bill", "another")).json()["tags"] == ["policymaker"], "the tags stay"

    page.locator("section", has_text="Permissions").get_by_role("button", name="Edit", exact=True).click()
    dialog.get_by_label("Write").fill("(oops")
    page.get_by_role("button", name="Set", exact=True).click()
    view.sees("(oops")
    dialog.get_by_label("Write").fill("^bills")
    page.get_by_role("button", name="Set", exact=True).click()
    view.until("document.querySelector('main').innerText.includes('^bills')")
    assert live.get("/api/permissions/%2F/bill").json()["write"] == "^bills"
    page.get_by_role("button", name="Set topic permissions").click()
    dialog.get_by_label("Write").fill("^eu")
    page.get_by_role("button", name="Set", exact=True).click()
    view.until("document.querySelector('main').innerText.includes('amq.topic')")
    assert live.get("/api/users/bill/topic-permissions").json()[0]["write"] == "^eu"
    page.get_by_role("button", name="Clear").last.click()
    dialog.get_by_role("button", name="Clear").click()
    view.until("document.querySelector('main').innerText.includes('all routing keys are allowed')")
    assert live.get("/api/users/bill/topic-permissions").json() == []
    page.get_by_role("button", name="Clear").click()
    dialog.get_by_role("button", name="Clear").click()
    view.until("document.querySelector('main').innerText.includes('cannot access any virtual host')")
    assert live.get("/api/users/bill/permissions").json() == []

    page.get_by_role("button", name="Delete").click()
    confirm = dialog.get_by_role("button", name="Delete")
    assert confirm.is_disabled()
    dialog.locator("input").fill("bill")
    confirm.click()
    view.until("document.querySelector('main h1').innerText === 'Users'")
    assert "bill" not in {one["name"] for one in live.get("/api/users").json()}
    # The browser reports the refused pattern, and the 404 if the page requested the deleted user once more.
    view.forgive("status of 400", "status of 404")


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
def test_users_page_works_in_dark_mode_and_by_keyboard(live: Served, view: View, width: int) -> None:
    live.call(live.broker.users.put_user("a-user-with-a-name-that-is-rather-long-for-a-phone", tags=["monitoring"]))
    page = view.page
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme="dark")
    view.open("overview")
    view.press("g", "u")
    view.until("document.querySelector('main h1').innerText === 'Users'")
    view.sees("cannot log in")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("link", name="rather-long").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Set permissions").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="Set permissions").focus()
    page.keyboard.press("Enter")
    page.locator("dialog").get_by_label("Configure").wait_for()
    page.keyboard.press("Escape")
    view.until("!document.querySelector('dialog')")


def test_a_hostile_name_of_a_user_stays_text(live: Served, view: View) -> None:
    live.call(live.broker.users.put_user(HOSTILE_NAME, password=PASSWORD, tags=["management", "<b>tag</b>"]))
    live.call(live.broker.users.set_permission("/", HOSTILE_NAME, EVERYTHING))
    credentials = pika.PlainCredentials(HOSTILE_NAME, PASSWORD)
    connection = patient_connection(live.amqp_port, credentials=credentials)
    page = view.open("users?filter=onerror")
    page.get_by_role("link", name="onerror").click()
    view.until("document.querySelector('main h1').innerText.includes('onerror')")
    page.get_by_role("button", name="Delete").click()
    page.locator("dialog").get_by_text("onerror").first.wait_for()
    view.open("connections")
    page.locator("td .name", has_text="onerror").wait_for()
    assert page.evaluate("document.title") != "owned"
    assert page.locator("main img").count() == 0 and page.locator("main script").count() == 0
    assert page.locator("main b", has_text="tag").count() == 0
    connection.close()


def refuse_logins(view: View) -> list[str]:
    """Cancels the browser's login dialog; returns the paths it was opened for."""
    asked: list[str] = []
    session = view.page.context.new_cdp_session(view.page)

    def login(event: Any) -> None:
        assert event["authChallenge"]["scheme"] == "basic"
        asked.append(urlsplit(event["request"]["url"]).path)
        answer = {"requestId": event["requestId"], "authChallengeResponse": {"response": "CancelAuth"}}
        session.send("Fetch.continueWithAuth", answer)

    session.on(
        "Fetch.requestPaused", lambda event: session.send("Fetch.continueRequest", {"requestId": event["requestId"]})
    )
    session.on("Fetch.authRequired", login)
    session.send("Fetch.enable", {"handleAuthRequests": True})
    return asked


def test_the_browser_asks_for_a_login_and_shows_the_user(browser: Any, tmp_path: Path) -> None:
    live = Served(tmp_path / "data")
    users = live.broker.users
    live.call(users.put_user("root", password=PASSWORD, tags=["administrator"]))
    live.call(users.set_permission("/", "root", EVERYTHING))
    live.call(users.put_user("plain", password=PASSWORD))
    live.call(users.put_user("looker", password=PASSWORD, tags=["management"]))
    live.call(users.set_permission("/", "looker", EVERYTHING))
    live.publish("shown", {"value": "v"})
    live.call(users.remove_user("guest"))
    try:
        stranger = View(browser.new_context(), live.base)
        asked = refuse_logins(stranger)
        stranger.open()
        stranger.sees("You are not logged in.")
        assert asked == ["/api/whoami"], "once, and before anything else"
        assert all("status of 401" in text for text in stranger.complaints)
        stranger.page.context.close()

        def logged_in(name: str) -> View:
            credentials = {"username": name, "password": PASSWORD}
            return View(browser.new_context(http_credentials=credentials), live.base)

        untagged = logged_in("plain")
        untagged.open()
        untagged.sees("You may not use the dashboard.")
        untagged.page.context.close()

        for name, has_users in (("root", True), ("looker", False)):
            view = logged_in(name)
            page = view.open("streams")
            view.sees("live")
            page.locator(".who", has_text=name).wait_for()
            assert page.get_by_role("link", name="Users").count() == has_users
            view.open("overview")
            page.wait_for_selector(".uplot canvas")
            view.open("stream/%2F/shown/messages")
            address = f"{live.base}/topics/shown/messages?partition=0&offset=0&limit=1"
            assert copied_as_curl(view) == f"curl -u '{name}' '{address}'"
            page.context.close()
            assert [text for text in view.complaints if "status of 401" not in text] == []
    finally:
        live.stop()
