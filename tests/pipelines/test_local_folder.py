"""Which local folder pipelines and maintenance accept as the data folder of their broker."""

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import NotFound
from headrace.pipelines.maintenance import TopicMaintenance
from headrace.pipelines.run import BrokerEndpoint
from headrace.spark.broker import BrokerLink
from tests.spark.world import RunningBroker


@pytest.fixture
def elsewhere(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> RunningBroker:
    """A broker on another machine whose data folder has the same path as one of a broker here."""
    get = BrokerLink.get

    def answer(self: BrokerLink, *path: str, **query: str | int | None) -> dict[str, Any]:
        said = get(self, *path, **query)
        return said | {"pid": said["pid"] + 1} if path == ("status",) else said

    monkeypatch.setattr(BrokerLink, "get", answer)
    return broker


def reading(url: str, *, local: bool) -> dict[str, str]:
    where = BrokerEndpoint(url, local=local)
    where.link.close()
    return where.reading()


def test_the_data_folder_of_a_local_broker_is_found(broker: RunningBroker) -> None:
    assert reading(broker.url, local=True) == {"bootstrap": broker.url, "path": broker.path}
    assert reading(broker.url, local=False) == {"bootstrap": broker.url}
    upkeep = TopicMaintenance(broker.url)
    upkeep.link.close()
    assert Path(upkeep.folder) == broker.data


def test_a_folder_opened_by_another_broker_is_not_used(elsewhere: RunningBroker) -> None:
    assert reading(elsewhere.url, local=True) == {"bootstrap": elsewhere.url}
    with pytest.raises(NotFound, match="is not on this machine"):
        TopicMaintenance(elsewhere.url)
