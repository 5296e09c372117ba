"""The limit on unauthenticated connections per address, and which of them are evicted."""

from headrace.listeners.common.per_source_limit import PerSourceLimit

HERE, ELSEWHERE = "203.0.113.7", "198.51.100.1"


def test_one_address_gets_three_quarters_of_the_places_and_its_oldest_is_evicted() -> None:
    crowd: PerSourceLimit[str] = PerSourceLimit(lambda: 4)
    assert [crowd.enter(HERE, name) for name in "abc"] == [None] * 3
    assert crowd.enter(ELSEWHERE, "x") is None
    assert crowd.enter(HERE, "d") == "a"
    crowd.leave(HERE, "a")
    assert crowd.enter(HERE, "e") == "b"


def test_an_authenticated_client_no_longer_counts() -> None:
    """A thousand clients behind one address, where four places are left."""
    crowd: PerSourceLimit[int] = PerSourceLimit(lambda: 4)
    for number in range(1000):
        assert crowd.enter(HERE, number) is None
        crowd.leave(HERE, number)
        crowd.leave(HERE, number)  # again when its connection ends
    assert len(crowd) == 0


def test_the_last_place_goes_to_the_newest_client() -> None:
    crowd: PerSourceLimit[str] = PerSourceLimit(lambda: 0)
    assert crowd.enter(HERE, "a") is None
    assert crowd.enter(HERE, "b") == "a"
