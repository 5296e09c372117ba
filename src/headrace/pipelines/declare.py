"""The declaration of a pipeline: sources, flows and sinks.

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

The parameters of a flow function are names of sources. It receives a streaming DataFrame for each and returns the rows
for its sink, and optionally a second DataFrame with failed records for the dead-letter topic.
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
    """A topic to read, or several with `topics` or `topic_pattern`. `options` are options of the Spark source."""

    topic: str | None = None
    topics: str | None = None
    topic_pattern: str | None = None
    start: str | None = None  # default: earliest, unless the options contain a timestamp
    pin: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    def as_options(self) -> dict[str, str]:
        named = {"topic": self.topic, "topics": self.topics, "topicPattern": self.topic_pattern}
        given = {name: value for name, value in named.items() if value is not None}
        if len(given) != 1:
            raise InvalidInput("a source needs exactly one of topic, topics and topic_pattern")
        starts_at_timestamp = any(name.lower() == "startingtimestamp" for name in self.options)
        start = self.start or (None if starts_at_timestamp else "earliest")
        return given | ({} if start is None else {"startingOffsets": start}) | dict(self.options)


@dataclass(frozen=True)
class Sink:
    """A topic to write. Without a topic, the column `topic` of each row gives it."""

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
            raise InvalidInput(f"{name!r} is not a pipeline name; use letters, digits, dots, dashes and underscores")
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
                raise InvalidInput(f"the output mode of sink {key!r} must be one of {', '.join(OUTPUT_MODES)}")

    def flow(self, to: str) -> Callable[[Flow], Flow]:
        """Decorator: the function produces the rows of a sink."""
        if to not in self.sinks:
            raise InvalidInput(f"pipeline {self.name!r} has no sink {to!r}; it has {', '.join(self.sinks) or 'none'}")

        def register(function: Flow) -> Flow:
            name = function.__name__
            if name in self.flows:
                raise InvalidInput(f"pipeline {self.name!r} has two flows called {name!r}")
            for parameter in inspect.signature(function).parameters:
                if parameter not in self.sources:
                    raise InvalidInput(
                        f"parameter {parameter!r} of flow {name!r} is not a source of pipeline {self.name!r}; "
                        f"its sources are {', '.join(self.sources)}"
                    )
            self.flows[name] = function, to
            return function

        return register

    def arguments(self, flow: str) -> list[str]:
        return list(inspect.signature(self.flows[flow][0]).parameters)


def parse_interval(text: str) -> str:
    """Turns "5s" into Spark's notation "5 seconds"."""
    match = INTERVAL.fullmatch(text)
    if match is None:
        raise InvalidInput(f"the trigger must be an interval such as 500ms, 1s or 5m, not {text!r}")
    return f"{match[1]} {UNITS[match[2]]}"
