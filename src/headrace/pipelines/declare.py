"""What a pipeline's file says: where records come from, which function makes what of them, where they go.

    pipeline = Pipeline(
        "orders",
        sources={"orders": Source("orders")},
        sinks={"totals": Sink("totals")},
        dead_letter="orders.dead",
    )

    @pipeline.flow(to="totals")
    def totals(orders):
        ...
        return rows, bad_rows        # or only rows

A function's parameters are names of sources; it gets a streaming DataFrame for each and returns the rows for the
sink it names, and if it likes a second DataFrame of records that failed, for the dead-letter topic.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import InvalidInput

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
INTERVAL = re.compile(r"(\d+)\s*(ms|s|m|h)")
UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}
OUTPUT_MODES = ("append", "update", "complete")

Flow = Callable[..., Any]


@dataclass(frozen=True)
class Source:
    """A topic to read, or several with `topics` or `topic_pattern`; `options` are those of the source."""

    topic: str | None = None
    topics: str | None = None
    topic_pattern: str | None = None
    start: str | None = None  # the earliest, unless options say a time
    pin: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    def as_options(self) -> dict[str, str]:
        named = {"topic": self.topic, "topics": self.topics, "topicPattern": self.topic_pattern}
        given = {name: value for name, value in named.items() if value is not None}
        if len(given) != 1:
            raise InvalidInput("a source has one of topic, topics and topic_pattern")
        begins_at_a_time = any(name.lower() == "startingtimestamp" for name in self.options)
        start = self.start or (None if begins_at_a_time else "earliest")
        return given | ({} if start is None else {"startingOffsets": start}) | dict(self.options)


@dataclass(frozen=True)
class Sink:
    """A topic to write. Without one every row says where it goes, in its column `topic`."""

    topic: str | None = None
    compression: str = "none"
    output_mode: str = "append"
    options: Mapping[str, str] = field(default_factory=dict)

    def as_options(self) -> dict[str, str]:
        named = {} if self.topic is None else {"topic": self.topic}
        return named | {"compression": self.compression} | dict(self.options)


class Pipeline:
    def __init__(
        self,
        name: str,
        *,
        sources: Mapping[str, Source],
        sinks: Mapping[str, Sink],
        trigger: str = "1s",
        dead_letter: str | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        if NAME.fullmatch(name) is None:
            raise InvalidInput(f"{name!r} is not a name for a pipeline: letters, digits, dots, dashes, underscores")
        self.name = name
        self.sources = dict(sources)
        self.sinks = dict(sinks)
        self.interval = parse_interval(trigger)
        self.dead_letter = dead_letter
        self.conf = dict(conf or {})
        self.flows: dict[str, tuple[Flow, str]] = {}
        for source in self.sources.values():
            source.as_options()
        for key, sink in self.sinks.items():
            if sink.output_mode not in OUTPUT_MODES:
                raise InvalidInput(f"the output mode of sink {key!r} is one of {', '.join(OUTPUT_MODES)}")

    def flow(self, to: str) -> Callable[[Flow], Flow]:
        """Says that a function makes the rows of a sink."""
        if to not in self.sinks:
            raise InvalidInput(f"pipeline {self.name!r} has no sink {to!r}; it has {', '.join(self.sinks) or 'none'}")

        def remember(function: Flow) -> Flow:
            name = function.__name__
            if name in self.flows:
                raise InvalidInput(f"pipeline {self.name!r} has two flows called {name!r}")
            for parameter in inspect.signature(function).parameters:
                if parameter not in self.sources:
                    raise InvalidInput(
                        f"flow {name!r} asks for {parameter!r}, which is no source of {self.name!r}: "
                        f"there are {', '.join(self.sources)}"
                    )
            self.flows[name] = function, to
            return function

        return remember

    def arguments(self, flow: str) -> list[str]:
        return list(inspect.signature(self.flows[flow][0]).parameters)


def parse_interval(text: str) -> str:
    """5s as Spark writes it: 5 seconds."""
    match = INTERVAL.fullmatch(text)
    if match is None:
        raise InvalidInput(f"a trigger is a time such as 500ms, 1s or 5m, not {text!r}")
    return f"{match[1]} {UNITS[match[2]]}"
