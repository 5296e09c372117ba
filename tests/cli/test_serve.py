"""`headrace serve`: starting, stopping, and every error that prevents a start."""

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import Client
from tests.cli.running import ONLY_HTTP, SMALL, Broker, Started, closed_terminals, headrace, serving


def start_that_fails(*arguments: str, cwd: Path | None = None, **env: Any) -> tuple[int, str]:
    """The exit code and the error sentence."""
    done = headrace("serve", *arguments, cwd=cwd, **env)
    sentence = done.stderr.decode()
    assert sentence.count("\n") == 1, sentence
    assert "Traceback" not in sentence
    return done.returncode, sentence


@pytest.mark.parametrize(
    ("hangups", "number"),
    [(signal.SIG_IGN, signal.SIGTERM), (signal.SIG_DFL, signal.SIGHUP)],
    ids=["nohup", "terminal"],
)
def test_the_start_after_a_clean_stop_reports_it(tmp_path: Path, hangups: signal.Handlers, number: int) -> None:
    with closed_terminals(hangups):
        broker = Broker(tmp_path / "data")
    if hangups is signal.SIG_IGN:
        broker.process.send_signal(signal.SIGHUP)
    broker.said("pub", "orders", "one", "two")
    assert broker.stop(number) == 0
    assert "stopped; everything is on disk\n" in broker.lines
    with serving(tmp_path / "data") as again:
        assert any(line.startswith("clean stop: 1 log") for line in again.lines), again.lines
        assert again.said("sub", "orders", "-e") == "one\ntwo\n"


def test_a_kill_loses_nothing_and_the_next_start_reports_it(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "data")
    broker.said("pub", "orders", stdin=b"".join(b"%d\n" % n for n in range(1000)))
    assert broker.stop(signal.SIGKILL) == -signal.SIGKILL
    with serving(tmp_path / "data") as again:
        assert any("unclean stop" in line for line in again.lines), again.lines
        assert again.said("sub", "orders", "-e").splitlines() == [str(n) for n in range(1000)]


def test_the_start_prints_at_most_a_dozen_useful_lines(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as broker:
        text = "".join(broker.lines)
        assert len(broker.lines) <= 12
        assert str(tmp_path / "data") in text
        assert "durability sync: confirmed means on disk" in text
        assert f"curl {broker.url}/topics/hello/messages" in text


def test_a_port_in_use_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--http", f"127.0.0.1:{port}", "--amqp", "off", "--kafka", "off", *SMALL]
        code, sentence = start_that_fails("--data-dir", str(tmp_path / "data"), *flags)
    assert code == 10
    assert str(port) in sentence
    assert "--http" in sentence


def test_a_file_as_data_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    code, sentence = start_that_fails("--data-dir", str(tmp_path / "data"), *ONLY_HTTP)
    assert code == 6
    assert "it is not a folder" in sentence


def test_an_unusable_data_folder_is_reported_in_one_sentence() -> None:
    code, sentence = start_that_fails("--data-dir", "/proc/headrace", *ONLY_HTTP)  # not even root may write there
    assert code == 6
    assert "/proc/headrace cannot be opened" in sentence


def test_a_second_broker_on_a_folder_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as broker:
        code, sentence = start_that_fails("--data-dir", str(tmp_path / "data"), *ONLY_HTTP)
        assert code == 8
        assert str(broker.process.pid) in sentence
        assert broker.said("pub", "still", "there")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--segment-size", "big"], "segment_size (from the flag --segment-size): 'big' is not a size"),
        (["--amqp", "x:y"], "amqp (from the flag --amqp): 'x:y' is not an address"),
        (["--no-such-flag"], "no such option '--no-such-flag'"),
        (["--demo", "--http", "off"], "--demo needs the AMQP and the HTTP listener"),
        (["--amqp", "off", "--kafka", "off", "--http", "off"], "all listeners are off"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_an_invalid_setting_is_one_sentence_and_exit_code_2(tmp_path: Path, flags: list[str], sentence: str) -> None:
    code, said = start_that_fails("--data-dir", str(tmp_path / "data"), *flags)
    assert code == 2
    assert sentence in said
    assert not (tmp_path / "data").exists()


def test_an_invalid_environment_variable_is_named(tmp_path: Path) -> None:
    code, sentence = start_that_fails(cwd=tmp_path, HEADRACE_RETENTION_MS="soon")
    assert code == 2
    assert "from the environment, HEADRACE_RETENTION_MS" in sentence


def test_options_override_the_environment_and_that_the_file(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text('segment_size = "1MB"\nindex_interval = "8KB"\nretention_ms = "1d"\n')
    with serving(
        tmp_path / "data",
        "--segment-size",
        "3MB",
        "--profile",
        "availability",
        cwd=tmp_path,
        HEADRACE_SEGMENT_SIZE="2MB",
        HEADRACE_INDEX_INTERVAL="16KB",
    ) as broker:
        with Client(broker.url) as client:
            settings = {s["name"]: (s["value"], s["origin"]) for s in client.get("/status")["settings"]}
            client.create_topic("t")
            in_force = client.topic("t")["config"]
        assert settings["segment_size"] == ("3MB", "from the flag --segment-size")
        assert settings["index_interval"] == ("16KB", "from the environment, HEADRACE_INDEX_INTERVAL")
        assert settings["retention_ms"] == ("1d", "from headrace.toml")
        assert settings["checkpoint_interval"] == ("5s", "from profile availability")
        assert settings["compression"] == ("none", "default")
        assert (in_force["segment_size"], in_force["retention_ms"]) == ("3MB", "1d")


def test_storage_path_is_another_name_of_data_dir(tmp_path: Path) -> None:
    with serving(tmp_path / "ignored", "--storage-path", str(tmp_path / "used")):
        assert (tmp_path / "used").is_dir()
        assert not (tmp_path / "ignored").exists()


def test_the_log_can_be_written_as_json(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "data", "--log-format", "json", "--log-level", "debug")
    broker.stop()
    for line in broker.errors.splitlines():
        assert "level" in msgspec.json.decode(line)


def test_the_start_can_be_printed_as_json(tmp_path: Path) -> None:
    started = Started(["serve", "--data-dir", str(tmp_path), *ONLY_HTTP, *SMALL, "--json"])
    ready = msgspec.json.decode(started.until("^.*$")[0])
    assert ready["event"] == "ready" and ready["recovery"]["new"] and ready["data_dir"] == str(tmp_path)
    said = headrace("status", "--json", "--url", f"http://{ready['listeners']['http'][0]}")
    assert msgspec.json.decode(said.stdout)["pid"] == ready["pid"]
    assert started.stop() == 0
    assert [msgspec.json.decode(line)["event"] for line in started.lines] == ["ready", "stopping", "stopped"]


def test_a_start_imports_only_the_modules_it_needs(tmp_path: Path) -> None:
    broker = Broker(tmp_path, "--kafka", "localhost:0", "--amqp", "localhost:0", PYTHONPROFILEIMPORTTIME="1")
    assert broker.stop() == 0
    imported = {line.rpartition("|")[2].strip() for line in broker.errors.splitlines()}
    assert "headrace.listeners.kafka.dispatch" in imported
    for name in ("kio", "hypothesis", "prometheus_client", "pyarrow", "pyspark", "pandas"):
        assert not [one for one in imported if one.partition(".")[0] == name], name


def test_the_kafka_schemas_do_not_import_test_tools() -> None:
    """kio imports hypothesis if installed, as in tests; a broker must not."""
    code = (
        "import sys; from headrace.wire.kafka.schema import request_struct; request_struct(3, 9); "
        "print(sorted(name for name in sys.modules if name.startswith(('hypothesis', 'kio.index'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kio.index']"
