"""Setting: the description of one setting, and the parsing and formatting of its values."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from headrace.config.model import Config
from headrace.config.units import (
    Address,
    format_duration,
    format_size,
    parse_address,
    parse_duration,
    parse_size,
    quantity,
)
from headrace.errors import InvalidInput

ENV_PREFIX = "HEADRACE_"
LISTENERS = {"http": 15672, "amqp": 5672, "kafka": 9092}  # default ports
NUMBER_MOST = 2**53  # JSON readers that use doubles cannot represent larger integers exactly

Kind = Literal["size", "duration", "bool", "choice", "address", "path", "file", "text", "count", "names"]


DEFAULTS = Config()


class InvalidSetting(InvalidInput):
    """A setting is unknown or its value is invalid. The message names the setting, its origin and the reason."""

    def __init__(self, name: str, origin: str, reason: str) -> None:
        super().__init__(f"{name} ({origin}): {reason}")
        self.name, self.origin, self.reason = name, origin, reason


class Described(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    help: str  # printed unchanged by --help and in the docs


class Setting(Described, frozen=True, kw_only=True):
    """Spelling, bounds and help text of one field of Config, LogSettings (`log.x`) or StreamSettings (`stream.x`)."""

    path: str = ""  # path of the field, if it differs from the name
    choices: tuple[str, ...] = ()
    words: Mapping[str, int] = {}  # words that stand for a number, such as "unlimited"
    least: int = 0
    most: int | None = None
    aliases: tuple[str, ...] = ()
    unset: str = "auto"  # spelling of None

    @property
    def scope(self) -> Literal["broker", "stream"]:
        return "stream" if self.path.startswith("stream.") else "broker"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def default(self) -> str:
        """The default, formatted as in headrace.toml."""
        return self.render(self.read(DEFAULTS))

    def read(self, config: Config) -> object:
        value: object = config
        for part in (self.path or self.name).split("."):
            value = getattr(value, part)
        return value

    def parse(self, value: object, origin: str) -> object:
        """The value as the struct stores it. Raises InvalidSetting."""
        try:
            return PARSERS[self.kind](self, value)
        except ValueError as error:
            raise InvalidSetting(self.name, origin, str(error)) from None

    def render(self, value: object) -> str:
        """Inverse of parse: parse(render(x)) == x."""
        if value is None:
            return self.unset
        for word, number in self.words.items():
            if value == number:
                return word
        if self.kind == "bool":
            return "true" if value else "false"
        if self.kind == "size" and isinstance(value, int):
            return format_size(value)
        if self.kind == "duration" and isinstance(value, int):
            return format_duration(value)
        if isinstance(value, tuple):
            return ",".join(value)
        return str(value)


def _parse_number(setting: Setting, value: object) -> int:
    if isinstance(value, str) and (word := setting.words.get(value.strip().lower())) is not None:
        return word
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{_quote(value)} is not a whole number")
    if isinstance(value, int):
        number = value
    elif setting.kind == "size":
        number = parse_size(value)
    elif setting.kind == "duration":
        number = parse_duration(value)
    else:
        if "." in value:
            raise ValueError(f"{_quote(value)} is not a whole number")
        number = quantity(value, {"": 1}, "a whole number", "digits only")
    if number in setting.words.values():
        return number
    if number < setting.least:
        raise ValueError(f"{_quote(value)} is less than the minimum of {setting.render(setting.least)}")
    most = NUMBER_MOST if setting.most is None else setting.most
    if number > most:
        raise ValueError(f"{_quote(value)} is more than the maximum of {setting.render(most)}")
    return number


def _parse_bool(setting: Setting, value: object) -> bool:
    word = str(value).strip().lower()
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0"}:
        return False
    raise ValueError(f"{_quote(value)} is neither true nor false")


def _parse_choice(setting: Setting, value: object) -> str:
    word = value.strip().lower().replace(" ", "") if isinstance(value, str) else value
    if isinstance(word, str) and word in setting.choices:
        return word
    raise ValueError(f"{_quote(value)} is not one of {', '.join(setting.choices)}")


def _parse_names(setting: Setting, value: object) -> tuple[str, ...]:
    """A subset of the choices: a list in headrace.toml, separated by commas elsewhere."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise ValueError(f"{_quote(value)} is not a list of {', '.join(setting.choices)}")
    chosen = {_parse_choice(setting, name) for name in names}
    return tuple(choice for choice in setting.choices if choice in chosen)


def _parse_address(setting: Setting, value: object) -> Address | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        if value is False:  # accept `amqp = false` in headrace.toml
            return None
        raise ValueError(f"{_quote(value)} is not an address; write HOST:PORT or off")
    if str(value).strip().lower() in {"off", "none", "auto", "false"}:
        return None
    return parse_address(str(value), LISTENERS.get(setting.name, LISTENERS["kafka"]))


def _parse_text(setting: Setting, value: object) -> str | None:
    if value == setting.unset and setting.read(DEFAULTS) is None:
        return None
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"{_quote(value)} is not a {'text' if setting.kind == 'text' else 'path'}")
    return value if setting.kind == "text" else os.path.expanduser(value)


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


PARSERS: dict[str, Callable[[Setting, object], Any]] = {
    "size": _parse_number,
    "duration": _parse_number,
    "count": _parse_number,
    "bool": _parse_bool,
    "choice": _parse_choice,
    "address": _parse_address,
    "path": _parse_text,
    "file": _parse_text,
    "names": _parse_names,
    "text": _parse_text,
}
