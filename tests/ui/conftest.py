"""A real browser in front of a real broker."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.listeners.http.ui.files import FILES
from tests.listeners.amqp.running import patient_connection
from tests.listeners.api.conftest import Served
from tests.listeners.api.conftest import live as live  # a fixture

PATIENCE_S = 60
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
HOSTILE = "<img src=x onerror=\"document.title='owned'\">\"'</script><script>document.title='owned'</script>\u202eevil"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not Path(CHROMIUM).exists():
        reason = f"no Chromium at {CHROMIUM} (Debian: apt install chromium); CHROMIUM names another"
    elif _modules_missing():
        reason = "the dashboard's modules are missing: make ui, with npm installed"
    for item in items:
        if reason is not None and "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=reason))


def _modules_missing() -> bool:
    FILES.get("index.html")
    return not FILES.is_complete


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Per module: while Playwright runs, this thread has an event loop, and other tests need their own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=2 * PATIENCE_S * 1000
        )
        yield started
        started.close()


class View:
    """A page of the dashboard. Errors and warnings of the browser fail the test at its end."""

    def __init__(self, context: Any, base: str) -> None:
        self.page = context.new_page()
        self.base = base
        self._heard: list[str] = []
        self._forgiven: list[str] = []
        self._has_clock = False
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self._heard.append(str(error)))
        self.page.on("dialog", self._dismiss)
        self.page.set_default_timeout(PATIENCE_S * 1000)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self._heard.append(f"{message.text} ({message.location['url']})")

    def _dismiss(self, dialog: Any) -> None:
        self._heard.append(dialog.message)
        dialog.dismiss()

    @property
    def complaints(self) -> list[str]:
        return [text for text in self._heard if not any(part in text for part in self._forgiven)]

    def forgive(self, *parts: str) -> None:
        """Ignores browser errors that contain a text, at any time: some arrive only when the page closes."""
        self._forgiven += parts

    def open(self, path: str = "overview") -> Any:
        self.page.goto(f"{self.base}/#/{path}")
        self.page.wait_for_selector("main h1")
        return self.page

    def until(self, expression: str) -> None:
        """Polls from outside: the page's CSP forbids the eval that wait_for_function needs."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(50)

    def stop_time(self) -> None:
        """For keys of one shortcut: the page stops waiting for the second key after a while."""
        if not self._has_clock:
            self._has_clock = True
            self.page.clock.install()
        self.page.clock.pause_at(self.page.evaluate("Date.now()") / 1000 + 3600)

    def press(self, *keys: str) -> None:
        self.stop_time()
        for key in keys:
            self.page.keyboard.press(key)
        self.page.clock.resume()

    def sees(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()


@pytest.fixture
def view(live: Served, browser: Any) -> Iterator[View]:
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    opened = View(context, live.base)
    yield opened
    context.close()
    assert opened.complaints == []


@pytest.fixture
def amqp(live: Served) -> Iterator[Any]:
    connection = patient_connection(live.amqp_port)
    yield connection.channel()
    if connection.is_open:
        connection.close()


def copied_as_curl(view: View) -> str:
    """The curl command of the first message."""
    page = view.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".message-line").first.click()
    page.evaluate("navigator.clipboard.writeText('')")  # the toast of an earlier copy may still be shown
    page.get_by_role("button", name="Copy as curl").click()
    view.sees("Copied.")
    view.until("navigator.clipboard.readText().then((text) => text !== '')")
    return str(page.evaluate("navigator.clipboard.readText()"))
