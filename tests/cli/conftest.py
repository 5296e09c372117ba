from collections.abc import Iterator

import pytest

from tests.cli.running import Broker, serving


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for all tests of a module; each test uses its own topics."""
    # Some tests publish records that are years old, which retention would delete during the test.
    with serving(tmp_path_factory.mktemp("data"), "--retention-interval", "1h") as running:
        yield running
