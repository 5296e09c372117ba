from collections.abc import Iterator

import pytest

from tests.cli.running import Broker, serving


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("data"), "--retention-interval", "100ms") as running:
        yield running
