"""Parses and checks the options of the source and the sink. Errors name the option."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headrace.errors import InvalidInput
from headrace.record.layout import CODECS

PIN_MAX_AGE_MS = 24 * 3600 * 1000
EARLIEST, LATEST = -2, -1  # the notation of Spark's Kafka source in JSON

Isolation = Literal["read_committed", "read_uncommitted"]
Offsets = Literal["earliest", "latest"] | dict[str, dict[int, int]]

_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_SIZE = re.compile(r"(\d{1,18})\s*([kmg]?b)?", re.I)
_TIMES = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d{1,15})\s*(ms|s|m|h|d)")

READING = (
    "path", "bootstrap", "topic", "topics", "topicPattern", "startingOffsets", "endingOffsets",
    "startingTimestamp", "endingTimestamp", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "splitBytes", "columns",
    "includeHeaders", "verifyCrc", "failOnDataLoss", "cursor", "pin", "pinMaxAge", "isolation", "stopFile",
)  # fmt: skip
WRITING = (
    "path", "bootstrap", "topic", "compression", "batchBytes", "writeId", "writeBatch", "createTopics",
    "checkpointLocation",
)  # fmt: skip
# Options that Spark adds itself.
SPARK_OPTIONS = frozenset({"checkpointlocation", "queryname", "outputmode", "mode"})


class BadOption(InvalidInput):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"option {name!r}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ReadOptions:
    path: str | None
    bootstrap: str | None = field(repr=False)  # may contain a password
    topics: tuple[str, ...]  # empty if chosen by pattern
    pattern: str | None
    starting: Offsets | None
    ending: Offsets | None
    starting_ms: int | None
    ending_ms: int | None
    offsets_per_trigger: int | None
    bytes_per_trigger: int | None
    split_bytes: int | None  # None: chosen by plan.split_for
    columns: tuple[str, ...] | None
    include_headers: bool
    verify_crc: bool
    fail_on_data_loss: bool
    cursor: str | None
    pin: bool
    pin_max_age_ms: int
    isolation: Isolation
    stop_file: str | None

    def reads(self, topic: str) -> bool:
        return topic in self.topics if self.pattern is None else re.fullmatch(self.pattern, topic) is not None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    bootstrap: str = field(repr=False)
    topic: str | None
    codec: int
    batch_bytes: int
    write_id: str | None
    write_batch: int
    create_topics: bool


def check_names(options: Mapping[str, str]) -> None:
    """Refuses options that neither the source nor the sink has. Spark passes names in lower case."""
    known = {name.lower(): name for name in (*READING, *WRITING)}
    for name in options:
        if name.lower() not in known and name.lower() not in SPARK_OPTIONS:
            close = [n for low, n in known.items() if low.startswith(name.lower()[:4])]
            hint = f"; did you mean {', '.join(close)}?" if close else f"; valid options: {', '.join(known.values())}"
            raise BadOption(name, "no such option" + hint)


class _OptionReader:
    """Reads options by name, regardless of case."""

    def __init__(self, options: Mapping[str, str], allowed: tuple[str, ...], other: str) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        names = {name.lower() for name in allowed}
        written = {name.lower(): name for name in (*READING, *WRITING)}
        for name in self._values:
            if name not in names and name not in SPARK_OPTIONS:
                raise BadOption(written.get(name, name), f"is only for {other}")

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower())
        if value is None:
            return None
        value = str(value).strip()
        if not value:
            raise BadOption(name, "must not be empty")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in {"true", "false"}:
            raise BadOption(name, f"must be true or false, not {value!r}")
        return value.lower() == "true"

    def integer(self, name: str, least: int = 0) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if re.fullmatch(r"\d{1,18}", value) is None or int(value) < least:
            raise BadOption(name, f"must be a whole number of at least {least}, not {value!r}")
        return int(value)

    def size(self, name: str, least: int = 1) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        match = _SIZE.fullmatch(value)
        if match is None or int(match[1]) * _UNITS[(match[2] or "").lower()] < least:
            raise BadOption(name, f"must be a size of at least {least}, such as 64MB, not {value!r}")
        return int(match[1]) * _UNITS[(match[2] or "").lower()]

    def duration_ms(self, name: str, default: int) -> int:
        value = self.text(name)
        if value is None:
            return default
        match = _DURATION.fullmatch(value.lower())
        if match is None:
            raise BadOption(name, f"must be a duration with a unit, such as 12h or 30m, not {value!r}")
        return int(match[1]) * _TIMES[match[2]]

    def choice(self, name: str, *choices: str) -> str:
        value = self.text(name)
        if value is None:
            return choices[0]
        if value not in choices:
            raise BadOption(name, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def timestamp_ms(self, name: str) -> int | None:
        """Milliseconds since 1970, or a date in ISO 8601 (UTC if it has no zone)."""
        value = self.text(name)
        if value is None:
            return None
        if re.fullmatch(r"\d{1,18}", value):
            return int(value)
        from datetime import UTC, datetime

        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            reason = f"must be milliseconds since 1970 or a date such as 2026-01-31T12:00, not {value!r}"
            raise BadOption(name, reason) from None
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def read_options(options: Mapping[str, str]) -> ReadOptions:
    given = _OptionReader(options, READING, "writing")
    topics, pattern = _topics(given)
    path, bootstrap = given.text("path"), given.text("bootstrap")
    if path is None and bootstrap is None:
        raise BadOption("path", "or 'bootstrap' is needed: a data folder, or the HTTP address of a broker")
    columns = given.text("columns")
    parsed = ReadOptions(
        path=path,
        bootstrap=bootstrap,
        topics=topics,
        pattern=pattern,
        starting=_offsets("startingOffsets", given.text("startingOffsets")),
        ending=_offsets("endingOffsets", given.text("endingOffsets")),
        starting_ms=given.timestamp_ms("startingTimestamp"),
        ending_ms=given.timestamp_ms("endingTimestamp"),
        offsets_per_trigger=given.integer("maxOffsetsPerTrigger", 1),
        bytes_per_trigger=given.size("maxBytesPerTrigger"),
        split_bytes=given.size("splitBytes", 64 << 10),
        columns=None if columns is None else tuple(name.strip() for name in columns.split(",")),
        include_headers=given.flag("includeHeaders", False),
        verify_crc=given.flag("verifyCrc", True),
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        cursor=given.text("cursor"),
        pin=given.flag("pin", False),
        pin_max_age_ms=given.duration_ms("pinMaxAge", PIN_MAX_AGE_MS),
        isolation="read_committed"
        if given.choice("isolation", "read_committed", "read_uncommitted") == "read_committed"
        else "read_uncommitted",
        stop_file=given.text("stopFile"),
    )
    _check_combinations(parsed)
    return parsed


def _check_combinations(parsed: ReadOptions) -> None:
    if parsed.starting is not None and parsed.starting_ms is not None:
        raise BadOption("startingTimestamp", "cannot be combined with 'startingOffsets'")
    if parsed.ending is not None and parsed.ending_ms is not None:
        raise BadOption("endingTimestamp", "cannot be combined with 'endingOffsets'")
    if parsed.ending == "earliest":
        raise BadOption("endingOffsets", "must not be earliest, which would read nothing")
    if parsed.offsets_per_trigger is not None and parsed.bytes_per_trigger is not None:
        raise BadOption("maxBytesPerTrigger", "cannot be combined with 'maxOffsetsPerTrigger'")
    if parsed.cursor is not None and parsed.bootstrap is None:
        raise BadOption("cursor", "needs 'bootstrap', because the broker stores cursors")
    if parsed.pin and parsed.cursor is None:
        raise BadOption("pin", "needs a 'cursor'")


def _topics(given: _OptionReader) -> tuple[tuple[str, ...], str | None]:
    one, many, pattern = given.text("topic"), given.text("topics"), given.text("topicPattern")
    named = [name for name, value in (("topic", one), ("topics", many), ("topicPattern", pattern)) if value]
    if len(named) != 1:
        reason = f"cannot be combined with {', '.join(named[1:])}" if named else "'topics' or 'topicPattern' is needed"
        raise BadOption(named[0] if named else "topic", reason)
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise BadOption("topicPattern", f"is not a regular expression: {error}") from None
        return (), pattern
    names = [one] if one is not None else [name.strip() for name in (many or "").split(",")]
    if not all(names):
        raise BadOption("topics", "contains an empty name")
    return tuple(dict.fromkeys(name for name in names if name)), None


def _offsets(name: str, value: str | None) -> Offsets | None:
    if value is None:
        return None
    if value == "earliest" or value == "latest":
        return "earliest" if value == "earliest" else "latest"
    try:
        parsed: Any = msgspec.json.decode(value)
        return {
            str(topic): {int(number): _offset(offset) for number, offset in partitions.items()}
            for topic, partitions in parsed.items()
        }
    except (msgspec.DecodeError, AttributeError, TypeError, ValueError):
        raise BadOption(
            name, f'must be earliest, latest or JSON such as {{"orders": {{"0": 100, "1": -2}}}}, not {value[:200]!r}'
        ) from None


def _offset(value: object) -> int:
    if type(value) is not int or value < EARLIEST:
        raise ValueError(value)
    return value


def write_options(options: Mapping[str, str]) -> WriteOptions:
    given = _OptionReader(options, WRITING, "reading")
    bootstrap = given.text("bootstrap")
    if bootstrap is None:
        raise BadOption("bootstrap", "is needed: only the broker can write to its logs")
    write_id, write_batch = given.text("writeId"), given.integer("writeBatch")
    if write_batch is not None and write_id is None:
        raise BadOption("writeBatch", "needs a 'writeId', whose batches it counts")
    compression = given.choice("compression", "none", *(name for name in CODECS if name != "none"))
    return WriteOptions(
        bootstrap=bootstrap,
        topic=given.text("topic"),
        codec=CODECS[compression],
        batch_bytes=given.size("batchBytes", 1024) or 256 << 10,
        write_id=write_id,
        write_batch=write_batch or 0,
        create_topics=given.flag("createTopics", True),
    )
