from collections.abc import Iterator

import pytest

from tests.cli.running import Broker, serving


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for the tests of a file: each uses topics of its own."""
    with serving(tmp_path_factory.mktemp("data")) as running:
        yield running
