"""Composes a Config from its sources. Precedence: flags, environment, headrace.toml, profile, default."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.declared import BY_NAME, DURABILITIES, PROFILES, SETTINGS, STREAM_SETTINGS
from headrace.config.model import Config
from headrace.config.setting import ENV_PREFIX, InvalidSetting, Setting
from headrace.log.settings import LogSettings, StreamSettings

CONFIG_FILE = "headrace.toml"


def load(
    flags: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    arguments: Mapping[str, object] | None = None,
) -> Config:
    """The effective settings. Flags map a setting's name to its value; None means that the flag was not given.

    `arguments` are settings given by a Python caller, such as `embedded.open`; they override every other source.
    """
    given: dict[str, tuple[object, str]] = {}
    if file is not None:
        given |= _from_file(file)
    given |= _from_environment(env or {})
    for name, value in (flags or {}).items():
        if value is not None:
            setting = find(name, "from a flag")
            given[setting.name] = (value, f"from the flag {setting.flag}")
    for name, value in (arguments or {}).items():
        if value is not None:
            given[find(name, "from an argument").name] = (value, "from an argument")
    return _compose(given)


def find(name: str, origin: str) -> Setting:
    """The setting of that name in any spelling: retention.ms, retention-ms or retention_ms."""
    spelling = name.strip().lower().replace("-", "_").replace(".", "_")
    setting = BY_NAME.get(spelling)
    if setting is None:
        near = difflib.get_close_matches(spelling, BY_NAME, n=1)
        raise InvalidSetting(name, origin, "no such setting" + (f"; did you mean {near[0]}?" if near else ""))
    return setting


def stream_settings(
    given: Mapping[str, object], base: StreamSettings, *, origin: str = "from the request"
) -> StreamSettings:
    """`base` with the settings of one stream applied; None resets a setting to the value in `base`."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        setting = find(name, origin)
        if setting.scope != "stream":
            raise InvalidSetting(name, origin, "can only be set for the whole broker, not per topic")
        if value is not None:
            changes[setting.path.removeprefix("stream.")] = setting.parse(value, origin)
    if not changes:
        return base  # one object for all streams without settings of their own: there may be many
    return _consistent(msgspec.structs.replace(base, **changes), origin)


def _consistent(settings: StreamSettings, origin: str) -> StreamSettings:
    if 0 <= settings.compaction_lag_max_ms < settings.compaction_lag_ms:
        raise InvalidSetting("compaction_lag_max", origin, "must not be less than compaction_lag")
    return settings


def stream_settings_text(settings: StreamSettings) -> dict[str, str]:
    """Every per-stream setting, formatted as in headrace.toml."""
    config = Config(stream=settings)
    return {setting.name: setting.render(setting.read(config)) for setting in STREAM_SETTINGS}


def _from_environment(env: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Ignores unknown HEADRACE_ variables: Kubernetes sets HEADRACE_PORT and others for a service of that name."""
    given: dict[str, tuple[object, str]] = {}
    for spelling, setting in BY_NAME.items():
        variable = ENV_PREFIX + spelling.upper()
        if variable in env:
            origin = f"from the environment, {variable}"
            _refuse_twice(setting, given, origin)
            given[setting.name] = (env[variable], origin)
    return given


def _refuse_twice(setting: Setting, given: Mapping[str, object], origin: str) -> None:
    """Neither of two spellings of one setting has precedence over the other."""
    if setting.name in given:
        names = ", ".join((setting.name, *setting.aliases))
        raise InvalidSetting(setting.name, origin, f"is set twice; use only one of its names: {names}")


def _from_file(file: Path) -> dict[str, tuple[object, str]]:
    origin = f"from {file}"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # Windows editors write a BOM
    except OSError as error:
        raise InvalidSetting("config", origin, f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting("config", origin, f"is not valid TOML: {error}") from None
    given: dict[str, tuple[object, str]] = {}
    for name, value in content.items():
        setting = find(name, origin)
        _refuse_twice(setting, given, origin)
        if setting.kind in {"path", "file"} and isinstance(value, str) and value.strip() and value != setting.unset:
            value = str(file.parent / os.path.expanduser(value))  # relative to the file, not to the current folder
        given[setting.name] = (value, origin)
    return given


def _compose(given: Mapping[str, tuple[object, str]]) -> Config:
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name, (value, origin) in given.items():
        values[name] = BY_NAME[name].parse(value, origin)
        origins[name] = origin
    for chooser, bundles in (("durability", DURABILITIES), ("profile", PROFILES)):
        chosen = str(values.get(chooser, BY_NAME[chooser].default))
        for name, value in bundles[chosen].items():
            if name not in values:
                values[name] = BY_NAME[name].parse(value, f"from {chooser} {chosen}")
                origins[name] = f"from {chooser} {chosen}"
    parts: dict[str, dict[str, Any]] = {"": {}, "log": {}, "stream": {}}
    for name, value in values.items():
        part, _, attribute = (BY_NAME[name].path or name).rpartition(".")
        parts[part][attribute] = value
    return Config(
        **parts[""],
        log=LogSettings(**parts["log"]),
        stream=_consistent(StreamSettings(**parts["stream"]), origins.get("compaction_lag_max", "")),
        origins=origins,
    )


class InForce(msgspec.Struct, frozen=True):
    name: str
    value: str
    default: str
    origin: str


def in_force(config: Config) -> list[InForce]:
    """Every setting with its value, default and origin, formatted as in headrace.toml; `headrace status` shows them."""
    return [
        InForce(
            name=setting.name,
            value=setting.render(setting.read(config)),
            default=setting.default,
            origin=config.origins.get(setting.name, "default"),
        )
        for setting in SETTINGS
    ]
