from collections.abc import Iterator

import pytest

from tests.cli.running import Broker, serving


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for the tests of a file: each uses topics of its own."""
    # Some records of tests are years old: retention would take them in the midst of one.
    with serving(tmp_path_factory.mktemp("data"), "--retention-interval", "1h") as running:
        yield running
