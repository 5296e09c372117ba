"""Composition root: opens the broker, starts the listeners, and stops both in the right order.

`headrace serve` calls `run`; tests that need a whole server in their own event loop use `Server`.
"""

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple, TextIO

import msgspec

from headrace.allocator import keep_freed_memory
from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.broker import Broker
from headrace.clock import Clock, SystemClock
from headrace.config import Address, Config
from headrace.listeners.common.exposure import describe_exposure
from headrace.listeners.common.sockets import Listener
from headrace.listeners.common.tls.certificate import Tls, tls_of
from headrace.nonblocking_stdio import NonBlockingOutput
from headrace.version import __version__

logger = logging.getLogger("headrace")

LISTENERS = ("amqp", "kafka", "http")
SCHEMES = {"amqp": ("amqp://", "amqps://"), "kafka": ("", "SSL://"), "http": ("http://", "https://")}  # plain, TLS
GC_THRESHOLDS = (20_000, 20, 50)  # collections block the event loop, and messages do not form reference cycles
GC_THRESHOLDS_AT_START = (500_000, 20, 50)  # what a start makes stays: collections took a fifth of its CPU
SIDE_PROCESS_STOP_S = 30.0
CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


class SideProcess(NamedTuple):
    """A command that runs while the broker runs, and its description in the start-up lines. `--url URL` is appended."""

    command: tuple[str, ...]
    description: str


class Server:
    """A broker and its listeners in the running event loop."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.listeners: dict[str, Listener] = {}

    @classmethod
    async def start(cls, config: Config, *, clock: Clock | None = None) -> "Server":
        tls = tls_of(config)
        server = cls(await Broker.open(config, clock=clock))
        if tls is not None:
            server.broker.stats.certificate_expires_s = tls.expires_s
        try:
            await server._write_before_listening(config)
            server.broker.standbys.start()
            for name in LISTENERS:
                address: Address | None = getattr(config, name)
                if address is not None:
                    await server._open_listener(name, address, tls if config.has_tls(name) else None)
        except BaseException:
            await server.close()
            raise
        addresses = {name: list(listener.addresses) for name, listener in server.listeners.items()}
        for listener in server.listeners.values():
            describe = getattr(listener, "describe", None)
            if describe is not None:  # the HTTP listener shows the addresses of all listeners
                describe(addresses)
        return server

    async def _write_before_listening(self, config: Config) -> None:
        """Makes the writes that a listener needs before it opens.

        They cannot be made later: a write may have to wait for standbys, and standbys connect through a listener.
        """
        if config.kafka is not None:
            from headrace.listeners.kafka.listener import cluster_of

            await cluster_of(self.broker)

    async def _open_listener(self, name: str, address: Address, tls: Tls | None) -> None:
        module = importlib.import_module(f"headrace.listeners.{name}.listener")
        self.listeners[name] = await module.start(self.broker, address, self.broker.config, tls=tls)

    @property
    def exposure(self) -> str:
        """One sentence: which clients can connect, and whether they have to log in."""
        users = self.broker.users
        protected_mode = ProtectedMode(users, is_enabled=self.broker.config.protected_mode)
        addresses = {name: list(listener.addresses) for name, listener in self.listeners.items()}
        return describe_exposure(users, protected_mode, addresses)

    async def close(self) -> None:
        """Closes the listeners, so that requests in progress get their response, then the broker, which syncs."""
        self.broker.is_stopping = True
        # Standbys are connected to the HTTP listener. It closes last, so that they receive all that is still confirmed.
        last = {"http"} if self.broker.standbys.wanted or list(self.broker.standbys) else set()
        for is_last in (False, True):
            await asyncio.gather(
                *(listener.close() for name, listener in self.listeners.items() if (name in last) == is_last)
            )
        await self.broker.close()


def run(
    config: Config, out: TextIO | None = None, *, side_process: SideProcess | None = None, as_json: bool = False
) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP and returns the exit code. Raises HeadraceError if it cannot start."""
    set_up_logging(config)
    _raise_open_files_limit()
    keep_freed_memory()
    events = (_JsonEvents if as_json else _TextEvents)(NonBlockingOutput(out or sys.stdout))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, events, side_process))
    return 0


async def _start_side_process(server: Server, side_process: SideProcess | None) -> asyncio.subprocess.Process | None:
    http = server.listeners.get("http")
    if side_process is None or http is None:
        return None
    url = server.broker.config.http_url(http.addresses[0])
    return await asyncio.create_subprocess_exec(*side_process.command, "--url", url)


async def _stop_side_process(child: asyncio.subprocess.Process | None) -> None:
    """Called before the listeners close, so that the process does not report a lost broker."""
    if child is None or child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        await asyncio.wait_for(child.wait(), SIDE_PROCESS_STOP_S)
    except TimeoutError:
        child.kill()
        await child.wait()


async def _serve(config: Config, events: "_TextEvents | _JsonEvents", side_process: SideProcess | None) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def stop_gracefully() -> None:
        if stop.is_set():
            os._exit(1)  # a second signal stops at once; the next start recovers
        stop.set()

    def stop_while_starting(_number: int, _frame: object) -> None:
        events.stopped_while_starting()
        os._exit(0)  # recovery survives a kill at any point, so there is nothing to wait for

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it: keep running without the terminal
        numbers.append(signal.SIGHUP)
    for number in numbers:
        # Not a handler of the event loop: recovery blocks the loop, for minutes if there is much to recover.
        signal.signal(number, stop_while_starting)
    clock = SystemClock()
    started = clock.monotonic()
    gc.set_threshold(*GC_THRESHOLDS_AT_START)
    server = await Server.start(config, clock=clock)
    for number in numbers:
        loop.add_signal_handler(number, stop_gracefully)
    _tune_garbage_collection()
    _measure_garbage_collection(server.broker)
    events.ready(server, clock.monotonic() - started, side_process)
    child = await _start_side_process(server, side_process)
    await stop.wait()
    events.stopping()
    await _stop_side_process(child)
    await server.close()
    events.stopped()


class _TextEvents:
    """Start and stop of the broker as text lines. Scripts may wait for the line `ready`."""

    def __init__(self, out: NonBlockingOutput) -> None:
        self._out = out

    def ready(self, server: Server, seconds: float, side_process: SideProcess | None) -> None:
        say, config = self._say, server.broker.config
        place = "on disk" if config.durability == "sync" else "in the page cache"
        promise = f"durability {config.durability}: confirmed means {place}"
        say(f"headrace {__version__}  data folder {config.data_dir}  {promise}")
        say(f"{server.broker.report.summary()}; started in {seconds:.2f} s")
        for name, listener in server.listeners.items():
            scheme = SCHEMES[name][config.has_tls(name)]
            say(f"{name:5}  " + "  ".join(f"{scheme}{address}" for address in listener.addresses))
        say(f"access   {server.exposure}")
        if "http" in server.listeners:
            has_tls = config.has_tls("http")
            home = f"{SCHEMES['http'][has_tls]}{server.listeners['http'].addresses[0]}"
            base = f"{home}/topics/hello/messages"
            curl = f"curl --cacert {config.tls_cert}" if has_tls else "curl"
            say(f"dashboard  {home}/")
            say(f"publish  {curl} {base} -H 'content-type: text/plain' -d 'hello, world'")
            say(f"read     {curl} {base}")
        if side_process is not None:
            say(f"demo     {side_process.description}")
        say("ready")

    def stopping(self) -> None:
        self._say("stopping")

    def stopped(self) -> None:
        self._say("stopped; everything is on disk")

    def stopped_while_starting(self) -> None:
        self._say("stopped before it was ready; nothing is lost, the next start recovers again")

    def _say(self, line: str) -> None:
        self._out.write(line + "\n")


class _JsonEvents:
    """Start and stop of the broker as one JSON object per line, each with its `event`."""

    def __init__(self, out: NonBlockingOutput) -> None:
        self._out = out

    def ready(self, server: Server, seconds: float, side_process: SideProcess | None) -> None:
        broker = server.broker
        self._say(
            "ready",
            version=__version__,
            pid=os.getpid(),
            data_dir=broker.config.data_dir,
            durability=broker.config.durability,
            seconds=seconds,
            listeners={name: list(listener.addresses) for name, listener in server.listeners.items()},
            tls=[name for name in server.listeners if broker.config.has_tls(name)],
            access=server.exposure,
            recovery=broker.report,
        )

    def stopping(self) -> None:
        self._say("stopping")

    def stopped(self) -> None:
        self._say("stopped")

    def stopped_while_starting(self) -> None:
        self._say("gave_up")

    def _say(self, event: str, **facts: object) -> None:
        self._out.write(msgspec.json.encode({"event": event, **facts}).decode() + "\n")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _raise_open_files_limit() -> None:
    """Raises the soft limit to the hard limit: every connection and cached segment is an open file.

    The usual soft limit of 1,024 only protects programs that call select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tune_garbage_collection() -> None:
    gc.collect()
    gc.freeze()  # objects that exist after the start stay alive: collections need not visit them
    gc.set_threshold(*GC_THRESHOLDS)


def _measure_garbage_collection(broker: Broker) -> None:
    """Records for /metrics how long collections block the event loop."""
    began = 0.0

    def measure(phase: str, _: object) -> None:
        nonlocal began
        if phase == "start":
            began = broker.clock.monotonic()
        else:
            broker.stats.gc_pause_s.observe(broker.clock.monotonic() - began)

    gc.callbacks.append(measure)


class _TextFormat(logging.Formatter):
    """One line per event: control characters in names chosen by clients are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{self.formatTime(record)} {record.levelname.lower()} {record.name}: {record.getMessage()}"
        text = text.translate(CONTROL_CHARACTERS)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _JsonFormat(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(event).decode()


def set_up_logging(config: Config) -> None:
    handler = logging.StreamHandler(NonBlockingOutput(sys.stderr))
    handler.setFormatter(_JsonFormat() if config.log_format == "json" else _TextFormat())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logger.setLevel(config.log_level.upper())
