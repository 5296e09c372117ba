"""`headrace pub`, `sub` and `tail`, against a real broker."""

import contextlib
import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from headrace import Consumer, Producer
from tests.cli.running import COMMAND, PATIENCE_S, Broker, Started, environment


def test_published_messages_are_read(broker: Broker) -> None:
    assert broker.said("pub", "hello", "one", "two", "-k", "key") == "hello\t0\t0\t1\t2\n"
    assert broker.said("sub", "hello", "-e") == "one\ntwo\n"
    assert broker.said("sub", "hello", "-e", "-K", ":") == "key:one\nkey:two\n"
    assert broker.said("sub", "hello", "-o", "1", "-c", "1") == "two\n"
    assert broker.said("sub", "hello", "-o", "-1", "-e") == "two\n"
    assert broker.said("sub", "hello", "-o", "end", "-e") == ""
    assert broker.said("sub", "hello", "-e", "-f", r"%t/%p/%o %k=%s (%S)\n") == (
        "hello/0/0 key=one (3)\nhello/0/1 key=two (3)\n"
    )


def test_lines_of_stdin_are_messages(broker: Broker) -> None:
    answer = broker.said("pub", "lines", "--json", stdin=b"a\nb\n\nc")
    (place,) = json.loads(answer)
    assert place == {"topic": "lines", "partition": 0, "first_offset": 0, "last_offset": 3, "messages": 4}
    assert broker.said("sub", "lines", "-e", "-D", ";") == "a;b;;c;"


def test_keys_delimiters_headers_and_tombstones(broker: Broker) -> None:
    broker.said("pub", "parts", "-K", "=", "-D", r"\0", "-Z", "-H", "a=1", "-H", "a=2", stdin=b"k=v\0gone=\0plain\0")
    lines = [json.loads(line) for line in broker.said("sub", "parts", "-e", "-J").splitlines()]
    assert [(m["key"], m["value"]) for m in lines] == [("k", "v"), ("gone", None), (None, "plain")]
    assert lines[0]["headers"] == [["a", "1"], ["a", "2"]]
    assert lines[0]["topic"] == "parts"


def test_keys_and_headers_may_be_any_bytes(broker: Broker) -> None:
    assert broker.run("pub", "bytes", "value", "-k", "\udcff", "-H", "name=\udcfe").returncode == 0
    assert broker.run("sub", "bytes", "-e", "-f", r"%k %h %s\n").stdout == b"\xff name=\xfe value\n"


def test_json_output_can_be_published_again(broker: Broker) -> None:
    broker.said("pub", "from", "-k", "k", "-H", "h=v", "text")
    with Producer("from", broker.url) as producer:
        producer.publish(b"\xff\x00", key=b"\xfe", headers=[("x", b"\x80"), ("x", None)])
        producer.publish(None, timestamp=1234)
    lines = broker.said("sub", "from", "-e", "-J")
    broker.said("pub", "to", "-J", stdin=lines.encode())
    with Consumer("from", broker.url) as first, Consumer("to", broker.url) as second:
        assert list(first.until_end()) == list(second.until_end())


def test_a_file_is_one_message(broker: Broker, tmp_path: Path) -> None:
    data = os.urandom(100_000) + b"\n"
    (tmp_path / "file").write_bytes(data)
    broker.said("pub", "files", "-F", str(tmp_path / "file"))
    assert broker.run("sub", "files", "-e", "-D", "").stdout == data


def test_many_lines_arrive_in_order(broker: Broker) -> None:
    lines = b"".join(b"line %d\n" % n for n in range(20_000))
    assert broker.said("pub", "many", stdin=lines) == "many\t0\t0\t19999\t20000\n"
    assert broker.run("sub", "many", "-e").stdout == lines


def test_a_follower_receives_new_messages(broker: Broker) -> None:
    broker.said("pub", "follow", "before")
    follower = Started(["sub", "follow", "-o", "0", "-c", "3"], HEADRACE_URL=broker.url)
    assert follower.until("before")
    broker.said("pub", "follow", "after", "later")
    assert follower.until("later")
    assert follower.process.wait(PATIENCE_S) == 0
    assert follower.stop() == 0


def test_several_partitions_are_followed_as_one(broker: Broker) -> None:
    broker.said("topic", "add", "spread", "-p", "3")
    follower = Started(["sub", "spread", "-c", "4", "-f", r"%p %s\n"], HEADRACE_URL=broker.url)
    broker.said("pub", "spread", "-p", "0", "first")
    follower.until("0 first")
    broker.said("pub", "spread", "-p", "2", "second")
    follower.until("2 second")  # by now it follows all partitions at once
    broker.said("pub", "spread", "-p", "1", "third")
    follower.until("1 third")
    broker.said("pub", "spread", "-p", "2", "fourth")
    follower.until("2 fourth")
    assert follower.process.wait(PATIENCE_S) == 0
    follower.stop()
    assert sorted(broker.said("sub", "spread", "-e").split()) == ["first", "fourth", "second", "third"]
    assert broker.said("sub", "spread", "-e", "-p", "2") == "second\nfourth\n"


def test_reading_by_time(broker: Broker) -> None:
    broker.said("topic", "add", "times", "-c", "retention_ms=-1")  # years old: retention would delete them
    with Producer("times", broker.url) as producer:
        for stamp in (1_000, 2_000, 3_000):
            producer.publish(str(stamp), timestamp=1_700_000_000_000 + stamp)
    assert broker.said("sub", "times", "-e", "-o", "s@1700000002000") == "2000\n3000\n"
    assert broker.said("sub", "times", "-o", "s@1700000001500,e@1700000003000") == "2000\n"
    assert broker.said("sub", "times", "-e", "-o", "s@1h") == ""


def test_tail_shows_the_last_messages_and_new_ones(broker: Broker) -> None:
    broker.said("pub", "tailed", *[f"m{n}" for n in range(20)])
    shown = broker.said("tail", "tailed", "--no-follow", "-n", "2")
    assert [line.split("  ")[1:] for line in shown.splitlines()] == [["0:18", "m18"], ["0:19", "m19"]]
    follower = Started(["tail", "tailed", "-n", "1"], HEADRACE_URL=broker.url)
    follower.until("m19")
    broker.said("pub", "tailed", "-k", "key", "next\x1b[2J")
    follower.until(r"0:20  key:  next\\x1b\[2J")  # control sequences are escaped
    assert follower.stop(signal.SIGINT) == 130
    assert follower.errors.strip() == ""
    assert json.loads(broker.said("tail", "tailed", "--no-follow", "-n", "1", "--json"))["offset"] == 20


def test_a_reader_that_exits_early_is_not_an_error(broker: Broker) -> None:
    broker.said("pub", "long", stdin=(b"x" * 99 + b"\n") * 5_000)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{' '.join(COMMAND)} sub long -e | head -c 50"],
        capture_output=True,
        env=environment(HEADRACE_URL=broker.url),
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (b"x" * 50, b"", 0)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["sub", "nothing-here", "-e"], 4, "headrace: topic 'nothing-here' does not exist"),
        (["sub", "errors", "-o", "somewhere"], 2, "is not a valid offset"),
        (["sub", "errors", "-o", "s@someday"], 2, "is not a time"),
        (["sub", "errors", "-f", "%x"], 2, "%x is not a format specifier"),
        (["sub", "errors", "-p", "7", "-e"], 4, "has no partition 7"),
        (["sub", "errors", "-o", "99", "-e"], 2, "offset 99 is outside 0 to 1"),
        (["pub", "errors", "x", "-k", "a", "-K", ":"], 2, "-k cannot be combined with -K"),
        (["pub", "errors", "x", "-H", "nope"], 2, "write NAME=VALUE"),
        (["pub", "not a name", "x"], 2, "is not a topic name"),
        (["pub", "errors", "-p", "9", "x"], 4, "partition 9"),
        (["pub", "errors", "-F", "/no/such/file"], 1, "no such file or directory: /no/such/file"),
        (["pub", "errors", "-J", "{"], 2, "not a JSON message"),
        (["sub"], 2, "missing argument 'TOPIC'"),
        (["queue", "purge", "", "--yes"], 2, "a name is empty"),
        (["queue", "ls", "--sort", "size"], 2, "queues have no column 'size'"),
        (["top", "--sort", "size"], 2, "is not one of 'name', 'kind', 'ready'"),
        (["queue", "ls", "-V", "\udcff"], 2, "not valid UTF-8"),
        (["topic", "create", "\udcff"], 2, "not valid UTF-8"),
    ],
)
def test_an_error_is_one_sentence(broker: Broker, arguments: list[str], code: int, sentence: str) -> None:
    if arguments[1:2] == ["errors"]:
        broker.said("pub", "errors", "x") if not broker.run("sub", "errors", "-c", "1").stdout else None
    done = broker.run(*arguments)
    said = done.stderr.decode()
    assert done.returncode == code, said
    assert sentence in said
    assert said.count("\n") == 1


def test_an_unreachable_broker_is_exit_code_3() -> None:
    done = subprocess.run(
        [*COMMAND, "pub", "x", "y"],
        env=environment(HEADRACE_URL="http://127.0.0.1:1"),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr == (
        b"headrace: no broker answers at http://127.0.0.1:1: connection refused "
        b"(start a broker with `headrace serve`, or set its address with --url or HEADRACE_URL)\n"
    )


def all_of(terminal: int) -> bytes:
    """Reads the output until the other end is closed."""
    text = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(terminal, 10_000):
            text += piece
    return text


def test_terminals_get_tables_and_pipes_get_tsv(broker: Broker) -> None:
    broker.said("pub", "shown", "x")
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [*COMMAND, "topic", "ls", "shown"],
            stdout=theirs,
            env=environment(HEADRACE_URL=broker.url, TERM="dumb", COLUMNS="80"),
            timeout=60,
            check=False,
        )
        os.close(theirs)
        text = all_of(ours).decode()
    finally:
        os.close(ours)
    assert done.returncode == 0
    assert [line.split() for line in text.splitlines()] == [["name", "kind", "partitions"], ["shown", "topic", "1"]]
    assert broker.said("topic", "ls", "shown") == "shown\ttopic\t1\n"
