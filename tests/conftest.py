"""How the suite is divided when several processes run it: by file, with everything that uses Spark in one."""

import pytest

SPARK = ("tests/spark/", "tests/pipelines/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.nodeid.partition("::")[0]
        # One Spark session serves all tests that need one: a second JVM would cost more than it saves.
        group = "spark" if path.startswith(SPARK) else path
        item.add_marker(pytest.mark.xdist_group(group))
