from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.log.helpers import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)
