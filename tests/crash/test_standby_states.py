"""After every change that was sent to it, a standby is crashed and its folder is opened as the folder of a broker: it
holds everything that was promised. See tests/crash/standby_world.py; HEADRACE_SEED sets the first seed."""

import os

import pytest

from headrace.log.standby import change_feed
from headrace.log.standby.change_feed import StandbyFeed
from headrace.log.standby.follower import Standby
from tests.crash.explore import Broken, Effort
from tests.crash.standby_world import explore_standby

SEED = int(os.environ.get("HEADRACE_SEED", "0"))
STATES = int(os.environ.get("HEADRACE_CRASH_STATES", "100000")) // 50


@pytest.mark.parametrize("piece_bytes", [400, 1 << 20])
def test_a_standby_holds_everything_promised_after_each_change(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(change_feed, "PIECE_BYTES", piece_bytes)
    seed, states, broken = SEED, 0, []
    while states < STATES:
        try:
            states += explore_standby(seed, states_max=STATES).states
        except Broken as error:
            broken.append(f"explore_standby({seed}): {error}")
            states += STATES // 4
        seed += 1
    assert not broken, "\n".join(broken)


def test_a_partial_write_on_a_full_disk_is_the_same_on_the_standby() -> None:
    effort = Effort(variants=1, nested_share=0.0)
    for seed in range(SEED, SEED + 10):
        explore_standby(seed, effort=effort, with_full_disk=True)


def test_the_explorer_finds_a_standby_that_does_not_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standby, "_sync", lambda self, path: None)
    assert _first_broken()


def test_the_explorer_finds_a_change_that_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Standby._rename
    monkeypatch.setattr(Standby, "_rename", lambda self, a, b: None if self.is_in_step else rename(self, a, b))
    assert _first_broken()


def test_the_explorer_finds_a_copy_that_overtakes_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of files are read too early: changes that are sent before them are newer."""
    read = StandbyFeed.read

    def early(self: StandbyFeed) -> bytes:
        following = read(self)
        sent, self.early = getattr(self, "early", b""), following  # type: ignore[attr-defined]
        if not self.is_copying:
            return sent + following
        return sent

    monkeypatch.setattr(change_feed, "PIECE_BYTES", 400)
    monkeypatch.setattr(StandbyFeed, "read", early)
    assert _first_broken()


def _first_broken() -> str:
    for seed in range(20):
        try:
            explore_standby(seed)
        except Broken as broken:
            return str(broken)
    return ""
