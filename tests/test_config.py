"""Settings: declaration, sources and their precedence, and error messages."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import config
from headrace.config import (
    DURABILITIES,
    PROFILES,
    SETTINGS,
    Address,
    Config,
    InvalidSetting,
    Setting,
    format_duration,
    format_size,
    in_force,
    load,
    parse_address,
    parse_duration,
    parse_size,
    stream_settings,
    stream_settings_text,
)
from headrace.log.settings import LogSettings, StreamSettings

MB = 1024 * 1024


def test_fields_and_settings_correspond_one_to_one() -> None:
    fields = [f for f in Config.__struct_fields__ if f not in {"log", "stream", "origins"}]
    fields += [f"log.{f}" for f in LogSettings.__struct_fields__]
    fields += [f"stream.{f}" for f in StreamSettings.__struct_fields__]
    assert sorted(setting.path or setting.name for setting in SETTINGS) == sorted(fields)


def test_every_setting_is_used() -> None:
    source = Path(config.__file__).parent.parent
    sources = [*source.rglob("*.py"), *source.rglob("*.pyx")]
    readers = [p for p in sources if p.parent.name != "config" and p.name != "settings.py"]
    text = "\n".join(path.read_text() for path in readers)
    fields = {setting.name: (setting.path or setting.name).rpartition(".")[2] for setting in SETTINGS}
    unread = {name for name, attribute in fields.items() if not re.search(rf"\.{attribute}\b", text)}
    said = {setting.name for setting in SETTINGS if "Not in force yet" in setting.help}
    assert unread == said | {"profile"}  # only used by config itself


def test_no_two_settings_share_a_spelling() -> None:
    spellings = [spelling for setting in SETTINGS for spelling in (setting.name, *setting.aliases)]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_a_default_survives_being_written_and_read(setting: Setting) -> None:
    default = setting.read(Config())
    assert setting.parse(setting.render(default), "test") == default


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("4 KB", 4096),
        ("256MB", 256 * MB),
        ("256 mib", 256 * MB),
        ("1.5g", 1536 * MB),
        ("2TB", 2 << 40),
        ("1_000", 1000),
        (" 7b ", 7),
    ],
)
def test_sizes_are_parsed(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        ("250", 250),
        ("100ms", 100),
        ("5s", 5000),
        ("1.5 h", 5_400_000),
        ("7d", 604_800_000),
        ("2min", 120_000),
    ],
)
def test_durations_are_parsed(text: str, duration_ms: int) -> None:
    assert parse_duration(text) == duration_ms


@given(st.integers(0, 2**60))
def test_formatted_values_parse_to_the_same_value(number: int) -> None:
    assert parse_size(format_size(number)) == number
    assert parse_duration(format_duration(number)) == number


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:5672", Address("localhost", 5672)),
        (":99", Address("localhost", 99)),
        ("99", Address("localhost", 99)),
        ("example.org", Address("example.org", 1234)),
        ("*:80", Address("0.0.0.0", 80)),
        ("[::1]:5672", Address("::1", 5672)),
        ("[::]", Address("::", 1234)),
        ("10.0.0.1:0", Address("10.0.0.1", 0)),
    ],
)
def test_addresses_are_parsed(text: str, address: Address) -> None:
    assert parse_address(text, 1234) == address
    assert parse_address(str(address), 1) == address


@pytest.mark.parametrize("text", ["", "a:b", "localhost:65536", "::1", "a:1:2", "http://x:1"])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|port"):
        parse_address(text, 1)


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('segment_size = "1MB"\nindex-interval = 8192\nhttp = "localhost:1"\nretention_ms = "1d"\n')
    env = {
        "HEADRACE_SEGMENT_SIZE": "2MB",
        "HEADRACE_HTTP": "localhost:2",
        "HEADRACE_PORT": "tcp://10.0.0.1:1",
    }
    config = load({"http": "localhost:3", "amqp": None}, env, file)
    assert config.http == Address("localhost", 3)
    assert config.stream.segment_size == 2 * MB
    assert config.stream.index_interval == 8192
    assert config.stream.retention_ms == 24 * 3600 * 1000
    assert config.amqp == Config().amqp
    origins = {entry.name: entry.origin for entry in in_force(config)}
    assert origins["http"] == "from the flag --http"
    assert origins["segment_size"] == "from the environment, HEADRACE_SEGMENT_SIZE"
    assert origins["index_interval"] == f"from {file}"
    assert origins["kafka"] == "default"


def test_storage_path_is_another_name_of_data_dir(tmp_path: Path) -> None:
    assert load({"storage_path": "a"}).data_dir == "a"
    assert load(env={"HEADRACE_STORAGE_PATH": "b"}).data_dir == "b"
    file = tmp_path / "x.toml"
    file.write_text('storage_path = "c"')
    assert load(file=file).data_dir == str(tmp_path / "c")  # relative to the file
    file.write_text('data_dir = "/c"')
    assert load(file=file).data_dir == "/c"


@pytest.mark.parametrize("profile", PROFILES)
def test_explicit_settings_override_a_profile(profile: str) -> None:
    config = load({"profile": profile, "segment_size": "5MB"})
    shown = {entry.name: entry for entry in in_force(config)}
    for name, value in PROFILES[profile].items():
        if name != "segment_size":
            assert (shown[name].value, shown[name].origin) == (value, f"from profile {profile}")
    assert config.stream.segment_size == 5 * MB


def test_durability_os_confirms_from_the_page_cache_unless_a_write_mode_is_given() -> None:
    config = load({"durability": "os"})
    assert (config.stream.write_mode, config.stream.flush_interval_ms, config.stream.flush_bytes) == (
        "async",
        0,
        0,
    )
    assert load({"durability": "os", "write_mode": "sync"}).stream.write_mode == "sync"
    assert set(DURABILITIES) == {"sync", "os"}


def test_a_listener_can_be_turned_off() -> None:
    assert load({"amqp": "off"}).amqp is None
    assert load(env={"HEADRACE_KAFKA": "OFF"}).kafka is None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"segment_size": "12XB"},
            "segment_size (from the flag --segment-size): '12XB' is not a size; write 256MB, 4 KB or a number of bytes",
        ),
        (
            {"segment_size": "9TB"},
            "segment_size (from the flag --segment-size): '9TB' is more than the maximum of 2147483647",
        ),
        ({"retention_ms": "-5"}, "retention_ms (from the flag --retention-ms): '-5' is less than the minimum of 0"),
        (
            {"retention_ms": "soon"},
            "retention_ms (from the flag --retention-ms): 'soon' is not a duration; write",
        ),
        (
            {"compression": "zip"},
            "compression (from the flag --compression): 'zip' is not one of none, gzip,",
        ),
        ({"amqp": "x:y"}, "amqp (from the flag --amqp): 'x:y' is not an address; write HOST:PORT"),
        ({"auto_create_topics": "maybe"}, "'maybe' is neither true nor false"),
        ({"journal_files": "2.5"}, "'2.5' is not a whole number"),
        ({"data_dir": " "}, "data_dir (from the flag --data-dir): ' ' is not a path"),
        ({"segment_sice": "1"}, "no such setting; did you mean segment_size?"),
    ],
)
def test_an_invalid_value_is_reported_with_its_setting_and_origin(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(flags)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    ["= 1", "no_such = 1", "segment_size = [1]", "http = true", "a = \xff", "data_dir = ''", "tls_cert = ' '"],
)
def test_an_invalid_file_is_reported_with_its_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "headrace.toml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidSetting, match=r"headrace\.toml"):
        load(file=file)


def test_a_setting_given_under_two_names_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('retention_bytes = "1GB"\nsegment_bytes = "1MB"\nsegment-size = "2MB"\n')
    with pytest.raises(
        InvalidSetting, match=r"toml\): is set twice; use only one of its names: segment_size, segment_bytes"
    ):
        load(file=file)
    with pytest.raises(InvalidSetting, match="is set twice"):
        load(env={"HEADRACE_DATA_DIR": "a", "HEADRACE_STORAGE_PATH": "a"})


def test_paths_expand_the_home_folder_and_files_may_have_a_bom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    file = tmp_path / "headrace.toml"
    file.write_text('data_dir = "~/data"\ntls_cert = "cert.pem"\n', encoding="utf-8-sig")
    config = load(env={"HEADRACE_TIER_DIR": "~/archive"}, file=file)
    assert (config.data_dir, config.log.tier_dir) == ("/home/ann/data", "/home/ann/archive")
    assert config.tls_cert == str(tmp_path / "cert.pem")


def test_a_missing_settings_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="No such file"):
        load(file=tmp_path / "nowhere.toml")


def test_a_stream_overrides_the_broker_in_any_spelling() -> None:
    base = StreamSettings(segment_size=MB)
    got = stream_settings({"retention.ms": 1000, "cleanup-policy": "delete,compact", "max.message.bytes": "2MB"}, base)
    assert got == msgspec.structs.replace(
        base, retention_ms=1000, cleanup_policy="delete,compact", batch_bytes_max=2 * MB
    )
    assert stream_settings({"retention_ms": -1}, base).retention_ms == -1
    assert stream_settings({"retention_ms": None}, base) == base
    assert stream_settings_text(got)["retention_ms"] == "1s"


@pytest.mark.parametrize("given_", [{"data_dir": "/"}, {"nonsense": 1}, {"segment_size": "x"}, {"segment_size": True}])
def test_a_stream_cannot_set_broker_settings(given_: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        stream_settings(given_, StreamSettings())


@given(st.dictionaries(st.sampled_from([s.name for s in SETTINGS]), st.one_of(st.text(), st.integers(), st.none())))
def test_any_invalid_value_raises_invalid_setting(flags: dict[str, object]) -> None:
    try:
        config = load(flags)
    except InvalidSetting:
        return
    assert load({entry.name: entry.value for entry in in_force(config)}).stream == config.stream
