"""What goes on while a page is open: lists get shorter, rights are taken away, fingers are quick, searches go on."""

from typing import Any

from tests.doors.api.conftest import Served
from tests.ui.conftest import View


def test_channels_and_connections_take_turns(live: Served, view: View, amqp: Any) -> None:
    page = view.open("connections")
    page.get_by_role("columnheader", name="Protocol").wait_for()
    page.get_by_role("button", name="Channels").click()
    page.get_by_role("columnheader", name="Unconfirmed").wait_for()
    page.get_by_role("button", name="Connections").click()
    page.get_by_role("columnheader", name="Protocol").wait_for()
    page.get_by_text("AMQP 0-9-1").first.wait_for()
