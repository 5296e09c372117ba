"""How the suite is divided when several processes run it, and what every process it starts can rely on."""

import signal

import pytest

SPARK = ("tests/spark/", "tests/pipelines/")

# A shell that starts a command in the background makes it ignore Ctrl-C, and so everything that command starts:
# the programs that the tests interrupt would never hear of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By file, so that what a file shares is made once, and everything that uses Spark in one process."""
    for item in items:
        path = item.nodeid.partition("::")[0]
        # One Spark session serves all tests that need one: a second JVM would cost more than it saves.
        group = "spark" if path.startswith(SPARK) else path
        item.add_marker(pytest.mark.xdist_group(group))
