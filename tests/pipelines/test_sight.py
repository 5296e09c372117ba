"""Which files a pipeline and upkeep take for those of the broker they talk to."""

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import NotFound
from headrace.pipelines.maintenance import Upkeep
from headrace.pipelines.run import Where
from headrace.spark.broker import BrokerLink
from tests.spark.world import RunningBroker


@pytest.fixture
def elsewhere(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> RunningBroker:
    """A broker on another machine, whose folder has the path that the folder of a broker here has, too."""
    get = BrokerLink.get

    def answer(self: BrokerLink, *path: str, **query: str | int | None) -> dict[str, Any]:
        said = get(self, *path, **query)
        return said | {"pid": said["pid"] + 1} if path == ("status",) else said

    monkeypatch.setattr(BrokerLink, "get", answer)
    return broker


def reading(url: str, *, local: bool) -> dict[str, str]:
    where = Where(url, local=local)
    where.link.close()
    return where.reading()


def test_the_folder_of_the_broker_itself_is_in_sight(broker: RunningBroker) -> None:
    assert reading(broker.url, local=True) == {"bootstrap": broker.url, "path": broker.path}
    assert reading(broker.url, local=False) == {"bootstrap": broker.url}
    upkeep = Upkeep(broker.url)
    upkeep.link.close()
    assert Path(upkeep.folder) == broker.data


def test_a_folder_of_the_same_path_that_another_broker_has_open_is_not_read(elsewhere: RunningBroker) -> None:
    assert reading(elsewhere.url, local=True) == {"bootstrap": elsewhere.url}
    with pytest.raises(NotFound, match="is not in sight"):
        Upkeep(elsewhere.url)
