"""Names on disk. All of them are made and parsed here, so that recovery, retention and documents cannot disagree.

logs/<id>-<slug>/<base>.log             first generation of a segment
logs/<id>-<slug>/<base>-<gen>.log       the same offsets rewritten (compaction, recovery)
                 <stem>.index .timeindex .seal      beside it
logs/<id>-<slug>/<base>-<gen>.tier      the same offsets archived: the manifest of
tier/<id>-<slug>/<base>-<gen>.parquet   which may be in another place (tier_dir)
held/<until>-<hex>/<id>-<stem>.log      hard link to a segment, made by a reader that needs it until then
damaged/...                             quarantined files, for people to look at
folder-id                               identifies a data folder; the same in all of its copies
standby                                 marks a copy of another broker's folder (standby/follower.py)
"""

import re
from typing import NamedTuple

LOGS = "logs"
JOURNAL = "journal"
STATE = "state"
CATALOG = "catalog"
CATALOG_COPY = "all.copy"
DAMAGED = "damaged"
STAGING = "staging"
HELD = "held"
SPILL = "spill"
TIERS = "tier"
TIER_ID = "tier-id"
SLOTS = "slots"
KEYS = "keys"
LOCK = "lock"
STANDBY = "standby"
FOLDER_ID = "folder-id"
LOST_AND_FOUND = "lost+found"  # in a data folder that is a mount point; only root can read it

DATA = ".log"
INDEX = ".index"
TIME_INDEX = ".timeindex"
SEAL = ".seal"
TIER = ".tier"
PARQUET = ".parquet"
CUT = ".cut"
UNFINISHED = ".tmp"
RESTORED = ".restored" + UNFINISHED
DELETED = ".deleted"
SPILLED = ".spill"
COPY = "-copy"

_SEGMENT = re.compile(r"(\d{20})(?:-(\d{6}))?\.(log|tier)")
_JOURNAL = re.compile(r"(\d{20})\.wal")
_STATE = re.compile(rf"(\d{{20}})\.state(?:{COPY})?")
_HELD = re.compile(r"(\d{13,16})-[0-9a-f]{32}")
_LOG_FOLDER = re.compile(r"(\d+)(?:-(.*))?")


class SegmentStem(NamedTuple):
    base: int
    generation: int

    def __str__(self) -> str:
        # Zero-padded, so that a directory listing is in log order.
        return f"{self.base:020d}-{self.generation:06d}" if self.generation else f"{self.base:020d}"


def parse_segment(name: str) -> SegmentStem | None:
    """Parse the name of a data file, or of the manifest of an archived segment."""
    match = _SEGMENT.fullmatch(name)
    return None if match is None else SegmentStem(int(match[1]), int(match[2] or 0))


def held_name(until_ms: int, name: str) -> str:
    """Folder of hard links to files that a reader uses, and the time until which they must stay."""
    return f"{until_ms}-{name}"


def held_until(name: str) -> int | None:
    match = _HELD.fullmatch(name)
    return None if match is None else int(match[1])


def journal_name(number: int) -> str:
    return f"{number:020d}.wal"


def parse_journal(name: str) -> int | None:
    match = _JOURNAL.fullmatch(name)
    return None if match is None else int(match[1])


def state_name(generation: int) -> str:
    return f"{generation:020d}.state"


def parse_state(name: str) -> int | None:
    match = _STATE.fullmatch(name)
    return None if match is None else int(match[1])


def slug(name: str) -> str:
    """The part of a client's name that is safe in a path. For people only; never parsed."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name)[:40].strip("-") or "log"


def log_folder(log_id: int, name_slug: str) -> str:
    return f"{log_id}-{name_slug}"


def parse_log_folder(name: str) -> int | None:
    match = _LOG_FOLDER.fullmatch(name)
    return None if match is None else int(match[1])
