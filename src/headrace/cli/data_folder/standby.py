"""`headrace standby`: keep a copy of a running broker's data folder that can take over from it.

Following drives the connection to the leader; headrace.log.standby.follower writes the copy.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.data_folder.folder import data_dir_option
from headrace.cli.options import json_option, settings_file
from headrace.errors import BrokerUnreachable, HeadraceError, StorageError, Unconfirmed
from headrace.nonblocking_stdio import NonBlockingOutput

if TYPE_CHECKING:
    from headrace.client.connection import Connection
    from headrace.log.standby.follower import Standby

PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 10.0
SILENCE_S_MAX = 30.0  # the leader sends something every two seconds
CONFIRM_S = 0.5  # interval of confirmations while no publisher waits for them
PROGRESS_S = 2.0
WAIT_S = 0.5
RETRY_STATUSES = frozenset({408, 429, 503})  # the leader is overloaded

Say = Callable[..., None]


@click.command()
@click.argument("url")
@data_dir_option
@click.option("--name", metavar="NAME", help="Name of this standby at the leader.  [default: the host name]")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the contents of a folder that is not a standby's copy, or that a broker has used since.",
)
@json_option
def standby(
    url: str, data_dir: str | None, config_file: Path | None, name: str | None, overwrite: bool, as_json: bool
) -> int:
    """Keep a copy of the data folder of the broker at URL, until SIGTERM or Ctrl-C.

    URL is the address of the leader's HTTP listener with an administrator: http://USER:PASSWORD@HOST:PORT. To take over
    when the leader is gone, stop this command and run `headrace serve` on the folder.

    \b
    headrace standby http://admin:secret@leader:15672 --data-dir /var/lib/headrace
    """
    from headrace.client.connection import Connection
    from headrace.client.exchange import parse_url
    from headrace.config import load
    from headrace.log.disk.disk import RealDisk
    from headrace.log.standby.follower import Standby, prepare

    config = load({"data_dir": data_dir}, os.environ, settings_file(config_file))
    root = os.path.abspath(config.data_dir)
    connection = Connection(parse_url(url), retry_s=0.0)
    disk = RealDisk()
    stop = Stop()
    try:
        kept = Standby(disk, root, prepare(disk, root, overwrite=overwrite), overwrite=overwrite)
        try:
            Following(connection, kept, name or socket.gethostname(), event_printer(as_json), stop).run()
        finally:
            kept.close()
    except OSError as error:
        raise StorageError(f"cannot write to the standby's data folder {root}: {error}") from error
    return 0


class Stopped(BaseException):
    """Raised inside `Stop.interrupts`. No error, so code that handles errors must not catch it."""


class Stop:
    """The request to stop, by signal. It takes effect between two changes, so that no change is half applied, and at
    once while the standby waits for the leader: a frozen one responds only after the client's timeout."""

    def __init__(self) -> None:
        self.is_requested = False
        self._raises = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)

    def _request(self, _number: int, _frame: object) -> None:
        if self.is_requested:
            os._exit(1)  # a second signal stops at once and leaves the folder as a kill would
        self.is_requested = True
        if self._raises:
            raise Stopped

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Within the block, which must not change the data folder, a request to stop raises Stopped."""
        self._raises = True
        try:
            if self.is_requested:
                raise Stopped
            yield
        finally:
            self._raises = False

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.is_requested and time.monotonic() < until:
            time.sleep(0.05)


class Following:
    """Follows a leader and reconnects when the connection is lost."""

    def __init__(self, connection: "Connection", kept: "Standby", name: str, say: Say, stop: Stop) -> None:
        self._connection = connection
        self._standby = kept
        self._name = name
        self._say = say
        self._stop = stop
        self._id = ""
        self._has_waiters = False
        self._confirmed = 0
        self._confirmed_s = self._said_s = 0.0

    def run(self) -> None:
        pause_s = PAUSE_S_MIN
        while not self._stop.is_requested:
            try:
                self._follow()
            except (BrokerUnreachable, Unconfirmed, Lost) as error:
                if self._standby.is_in_step:
                    pause_s = PAUSE_S_MIN
                self._say("lost", f"connection lost: {error}; retrying", reason=str(error))
                self._stop.pause(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            except Stopped:
                break
        is_in_step, position = self._standby.is_in_step, self._standby.position
        state = f"in step up to change {position:,}" if is_in_step else "the copy is not complete"
        self._say("stopped", f"stopped; {state}", in_step=is_in_step, position=position)

    def _follow(self) -> None:
        from headrace.client.shapes import JSON, encode
        from headrace.log.standby.frames import FORMAT, BadFrame, FrameReader

        kept = {path: list(facts) for path, facts in self._standby.kept().items()}
        body = encode({"name": self._name, "copy": self._standby.copy, "format": FORMAT, "kept": kept})
        with self._stop.interrupts():
            stream = self._connection.stream("/standby/stream", headers={"Content-Type": JSON}, body=body)
        reader = FrameReader()
        self._id = ""
        heard_s = time.monotonic()
        try:
            while not self._stop.is_requested:
                data = stream.read(WAIT_S)
                if data:
                    heard_s = time.monotonic()
                elif time.monotonic() - heard_s > SILENCE_S_MAX:
                    raise Lost(f"{self._connection.endpoint} has been silent for {SILENCE_S_MAX:.0f} s")
                for frame in reader.feed(data or b""):
                    self._apply(frame)
                    if self._stop.is_requested:
                        return
                if stream.response is not None:
                    self._raise_refusal(stream.response)
                if data is None:
                    raise Lost(f"{self._connection.endpoint} does not respond, or has closed the connection")
                self._confirm()
        except BadFrame as error:
            raise Lost(str(error)) from error
        finally:
            stream.close()
            self._connection.close()

    def _raise_refusal(self, response: Any) -> None:
        from headrace.client.shapes import raise_for

        if response.status in RETRY_STATUSES or response.status >= 500:
            raise Lost(f"{self._connection.endpoint} refused: {_detail(response)}")
        raise_for(response)
        raise Lost(f"{self._connection.endpoint} ended the stream")

    def _apply(self, frame: Any) -> None:
        from headrace.log.standby.frames import BadFrame, Kind

        if not self._id and frame.kind != Kind.HELLO:
            raise BadFrame("the first frame of the leader is not HELLO")
        was_in_step = self._standby.is_in_step
        self._standby.apply(frame)
        if frame.kind == Kind.HELLO:
            self._start_copy(frame)
        elif self._standby.is_in_step and not was_in_step:
            copied = self._standby.copied_bytes
            self._say("in step", f"in step; copied {copied:,} bytes", copied_bytes=copied)
            self._confirmed_s = 0.0
        elif not self._standby.is_in_step and time.monotonic() - self._said_s > PROGRESS_S:
            self._said_s = time.monotonic()
            copied, size = self._standby.copied_bytes, self._standby.copy_bytes
            self._say("copying", f"copying: {copied:,} of {size:,} bytes", copied_bytes=copied, copy_bytes=size)
            self._confirm()

    def _start_copy(self, frame: Any) -> None:
        from headrace.log.standby.follower import Hello

        hello = Hello.of(frame)
        self._id, self._has_waiters = hello.id, hello.waits
        self._confirmed, self._confirmed_s, self._said_s = 0, 0.0, 0.0
        endpoint = str(self._connection.endpoint)
        self._say("copying", f"copying the data folder of {endpoint}", leader=endpoint, version=hello.version)

    def _confirm(self) -> None:
        """Reports the position to the leader: at once if publishers wait for it, otherwise as a heartbeat."""
        from headrace.client.exchange import path_of
        from headrace.client.shapes import JSON, encode, raise_for

        position = self._standby.position if self._standby.is_in_step else 0
        now_s = time.monotonic()
        is_news = self._has_waiters and position > self._confirmed
        if not self._id or (not is_news and now_s - self._confirmed_s < CONFIRM_S):
            return
        body = encode({"position": position})
        path = path_of("standby", self._id)
        try:
            with self._stop.interrupts():
                response = self._connection.request("PUT", path, headers={"Content-Type": JSON}, body=body)
        except (BrokerUnreachable, Unconfirmed):
            # A stopping leader accepts no new connections, but it still sends changes on the stream: keep reading it.
            self._confirmed_s = now_s
            return
        if response.status in RETRY_STATUSES:
            return  # confirmed with the next frame
        if response.status == 404 or response.status >= 500:
            raise Lost(_detail(response))
        raise_for(response)
        self._confirmed, self._confirmed_s = position, now_s


class Lost(HeadraceError):
    """The connection to the leader is lost; it is retried."""


def _detail(response: Any) -> str:
    import msgspec

    try:
        return str(msgspec.json.decode(response.body)["detail"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        return f"status {response.status}"


def event_printer(as_json: bool) -> Say:
    out = NonBlockingOutput(sys.stdout)

    def say(event: str, text: str, **facts: object) -> None:
        if as_json:
            import msgspec

            text = msgspec.json.encode({"event": event, **facts}).decode()
        out.write(text + "\n")

    return say
