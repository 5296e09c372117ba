"""Write modes: when an append is confirmed, and which way it takes to the disk.

A mode is an object that answers the questions of the commit path; no other module compares its name. To add a mode,
add an object here and its name to `settings.WriteModeName` and to the choices of `write_mode` in config/declared.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WriteMode:
    name: str
    """As it is spelled in settings and in the catalog."""

    syncs_before_confirm: bool
    """An append is confirmed only once it is on stable storage. If not, the log's durable end lags behind its visible
    end until the next flush or checkpoint."""

    goes_through_journal: bool
    """A small append is written to the journal first and shares its sync with the rest of the round. If not, it is
    written straight to its segment. Atomic groups always go through the journal."""

    rides_alone: bool
    """An append gets a round of its own, so that it never waits for the bytes of others."""


SYNC = WriteMode("sync", syncs_before_confirm=True, goes_through_journal=True, rides_alone=False)
SYNC_IMMEDIATE = WriteMode("sync-immediate", syncs_before_confirm=True, goes_through_journal=True, rides_alone=True)
ASYNC = WriteMode("async", syncs_before_confirm=False, goes_through_journal=False, rides_alone=False)

WRITE_MODES = {mode.name: mode for mode in (SYNC, SYNC_IMMEDIATE, ASYNC)}
