"""Settings of a broker: declaration, help text, parsing, and precedence of their sources.

Every layer above the log may read a Config. The structs for storage settings live in headrace.log.settings, because
the log uses them without this package.
"""

from headrace.config.declared import (
    DURABILITIES,
    PROFILES,
    SETTINGS,
    STREAM_SETTINGS,
)
from headrace.config.load import (
    CONFIG_FILE,
    InForce,
    find,
    in_force,
    load,
    stream_settings,
    stream_settings_text,
)
from headrace.config.model import Config
from headrace.config.setting import LISTENERS, InvalidSetting, Setting
from headrace.config.units import (
    Address,
    format_duration,
    format_size,
    parse_address,
    parse_duration,
    parse_size,
)
from headrace.log.settings import StreamSettings

__all__ = [
    "CONFIG_FILE",
    "DURABILITIES",
    "LISTENERS",
    "PROFILES",
    "SETTINGS",
    "STREAM_SETTINGS",
    "Address",
    "Config",
    "InForce",
    "InvalidSetting",
    "Setting",
    "StreamSettings",
    "find",
    "format_duration",
    "format_size",
    "in_force",
    "load",
    "parse_address",
    "parse_duration",
    "parse_size",
    "stream_settings",
    "stream_settings_text",
]
