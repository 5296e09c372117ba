"""The settings of streams that have none of their own, and how they change while the broker runs.

They come from the broker's configuration. Changes at run time are kept in the catalog and override flags, environment
and headrace.toml, also after a restart. As in Kafka, there are two levels: a change for this node overrides one for the
whole cluster.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from headrace.broker.catalog.catalog import Catalog, shaped
from headrace.config import Config, stream_settings
from headrace.config import find as find_setting
from headrace.log.settings import StreamSettings

CATALOG_KIND = "settings"
ORIGIN = "from the request"
CHANGED = "changed at run time"

Kind = Literal["topic", "queue"]
Level = Literal["node", "cluster"]
LEVELS: tuple[Level, ...] = ("cluster", "node")  # later ones override earlier ones


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that were set, in their text form; and, under Kafka's names, values as Kafka clients set them, where the
    broker's own settings do not say the same."""

    config: dict[str, str] = {}
    kafka: dict[str, str] = {}

    def changed(self, change: "Change", base: StreamSettings) -> "Overrides":
        """Raises InvalidInput for settings that are unknown, invalid or not for streams."""
        stream_settings(change.settings, base, origin=ORIGIN)
        config, kafka = dict(self.config), dict(self.kafka)
        for name, value in change.settings.items():
            setting = find_setting(name, ORIGIN)
            if value is None:
                config.pop(setting.name, None)
            else:
                config[setting.name] = setting.render(setting.parse(value, ORIGIN))
        for name, text in change.kafka.items():
            if text is None:
                kafka.pop(name, None)
            else:
                kafka[name] = text
        return Overrides(config=config, kafka=kafka)


class Change(msgspec.Struct, frozen=True):
    """A change of settings; None removes a value, so that the default applies."""

    settings: Mapping[str, object] = {}
    kafka: Mapping[str, str | None] = {}


class StreamDefaults:
    """Owned by Streams, which applies a change to the streams."""

    def __init__(self, catalog: Catalog, config: Config) -> None:
        self.config = config  # with the changes at run time
        self.levels: dict[Level, Overrides] = dict.fromkeys(LEVELS, Overrides())
        self.configured = config  # without them
        self._catalog = catalog
        self._on_change: list[Callable[[Config], object]] = []

    def load(self) -> None:
        """Reads the catalog; blocking."""
        for document in self._catalog.load(CATALOG_KIND):
            for level in LEVELS:
                if document["identity"] == [level]:
                    self.levels[level] = shaped(CATALOG_KIND, document, Overrides)
        self.config = self._composed(self.levels)

    def on_change(self, callback: Callable[[Config], object]) -> None:
        self._on_change.append(callback)

    def base(self, kind: Kind) -> StreamSettings:
        """The settings of a stream without settings of its own.

        Retention and compaction of topics do not apply to queues: a queue keeps a message until it is settled."""
        return _base(self.config, kind)

    def settings(self, name: str, kind: Kind, config: Mapping[str, str]) -> StreamSettings:
        return stream_settings(config, self.base(kind), origin=f"of {name!r}")

    def changed(self, level: Level, overrides: Overrides) -> "StreamDefaults":
        """A copy with the change. Raises InvalidInput if the change is invalid."""
        copy = StreamDefaults(self._catalog, self.configured)
        copy.levels = {**self.levels, level: overrides}
        copy.config = self._composed(copy.levels)
        return copy

    def store(self, level: Level) -> None:
        """Durable on return; blocking."""
        if self.levels[level] == Overrides():
            self._catalog.remove(CATALOG_KIND, (level,))
        else:
            self._catalog.put(CATALOG_KIND, (level,), msgspec.to_builtins(self.levels[level]))

    def use(self, changed: "StreamDefaults") -> None:
        self.levels, self.config = changed.levels, changed.config
        for callback in self._on_change:
            callback(self.config)

    def _composed(self, levels: Mapping[Level, Overrides]) -> Config:
        given = {name: text for level in LEVELS for name, text in levels[level].config.items()}
        if not given:
            return self.configured
        stream = stream_settings(given, self.configured.stream, origin=CHANGED)
        origins = {**self.configured.origins, **dict.fromkeys(given, CHANGED)}
        return msgspec.structs.replace(self.configured, stream=stream, origins=origins)


def _base(config: Config, kind: Kind) -> StreamSettings:
    return _of_queues(config.stream) if kind == "queue" else config.stream


@lru_cache(maxsize=8)  # one object for all queues: there may be many
def _of_queues(settings: StreamSettings) -> StreamSettings:
    return msgspec.structs.replace(settings, retention_ms=-1, retention_bytes=-1, cleanup_policy="delete")
