"""The composition root: opens the broker, starts the listeners, and stops both in the right order."""

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
from headrace.broker.broker import Broker
from headrace.clock import Clock, SystemClock
from headrace.config import Address, Config
from headrace.listeners.common.sockets import Listener
from headrace.listeners.common.tls.certificate import Tls, tls_of
from headrace.nonblocking_stdio import NonBlockingOutput
from headrace.version import __version__

logger = logging.getLogger("headrace")

LISTENERS = ("amqp", "kafka", "http")
# Without TLS, and with.
SCHEMES = {"amqp": ("amqp://", "amqps://"), "kafka": ("", "SSL://"), "http": ("http://", "https://")}
GC_THRESHOLDS = (20_000, 20, 50)  # collections cost the loop time, and messages are not garbage in cycles
BESIDE_PATIENCE_S = 30.0
CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


class Beside(NamedTuple):
    """A command that runs beside the broker for as long as it does, and what people are told about it."""

    command: tuple[str, ...]
    text: str


class Server:
    """A broker with its listeners, in the running event loop."""

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
            await server._prepare(config)
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
            if describe is not None:
                describe(addresses)
        return server

    async def _prepare(self, config: Config) -> None:
        """What a listener writes before it opens: later it would wait for standbys, which come in by a listener."""
        if config.kafka is not None:
            from headrace.listeners.kafka.listener import cluster_of

            await cluster_of(self.broker)

    async def _open_listener(self, name: str, address: Address, tls: Tls | None) -> None:
        module = importlib.import_module(f"headrace.listeners.{name}.listener")
        self.listeners[name] = await module.start(self.broker, address, self.broker.config, tls=tls)

    async def close(self) -> None:
        """Listeners first: whoever was promised an answer gets it. Then everything is synced."""
        self.broker.is_stopping = True
        # Standbys come in by the HTTP listener: it closes last, so that they have what the others still confirm.
        last = {"http"} if self.broker.standbys.wanted or list(self.broker.standbys) else set()
        for are_last in (False, True):
            await asyncio.gather(
                *(listener.close() for name, listener in self.listeners.items() if (name in last) == are_last)
            )
        await self.broker.close()


def run(config: Config, out: TextIO | None = None, *, beside: Beside | None = None, as_json: bool = False) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP; the exit code. HeadraceError says in one sentence why it cannot."""
    set_up_logging(config)
    _allow_many_files()
    keep_freed_memory()
    speaker = (_JsonSpeaker if as_json else _TextSpeaker)(NonBlockingOutput(out or sys.stdout))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, speaker, beside))
    return 0


async def _start_beside(server: Server, beside: Beside | None) -> asyncio.subprocess.Process | None:
    http = server.listeners.get("http")
    if beside is None or http is None:
        return None
    url = server.broker.config.http_url(http.addresses[0])
    return await asyncio.create_subprocess_exec(*beside.command, "--url", url)


async def _stop_beside(child: asyncio.subprocess.Process | None) -> None:
    """First, so that it does not complain about a broker that goes away."""
    if child is None or child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        await asyncio.wait_for(child.wait(), BESIDE_PATIENCE_S)
    except TimeoutError:
        child.kill()
        await child.wait()


async def _serve(config: Config, speaker: "_TextSpeaker | _JsonSpeaker", beside: Beside | None) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def ask_to_stop() -> None:
        if stop.is_set():
            os._exit(1)  # the second time somebody means it; a start after that recovers
        stop.set()

    def give_up(_number: int, _frame: object) -> None:
        speaker.gave_up()
        os._exit(0)  # to recovery a kill changes nothing, so there is nothing to wait for

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it: then a closed terminal means nothing
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, give_up)  # not of the loop: recovery holds it, for minutes where there is much
    clock = SystemClock()
    started = clock.monotonic()
    server = await Server.start(config, clock=clock)
    for number in numbers:
        loop.add_signal_handler(number, ask_to_stop)
    _tune_garbage_collection()
    _watch_garbage_collection(server.broker)
    speaker.greet(server, clock.monotonic() - started, beside)
    child = await _start_beside(server, beside)
    await stop.wait()
    speaker.stopping()
    await _stop_beside(child)
    await server.close()
    speaker.stopped()


class _TextSpeaker:
    """For people, and scripts that wait for the line `ready`."""

    def __init__(self, out: NonBlockingOutput) -> None:
        self._out = out

    def greet(self, server: Server, seconds: float, beside: Beside | None) -> None:
        say, config = self._say, server.broker.config
        promise = "confirms mean on disk" if config.durability == "sync" else "confirms mean in the page cache"
        say(f"headrace {__version__}  data in {config.data_dir}  {promise}")
        say(f"{server.broker.report.summary()}; started in {seconds:.2f} s")
        for name, listener in server.listeners.items():
            scheme = SCHEMES[name][config.has_tls(name)]
            say(f"{name:5}  " + "  ".join(f"{scheme}{address}" for address in listener.addresses))
        if "http" in server.listeners:
            has_tls = config.has_tls("http")
            home = f"{SCHEMES['http'][has_tls]}{server.listeners['http'].addresses[0]}"
            base = f"{home}/topics/hello/messages"
            curl = f"curl --cacert {config.tls_cert}" if has_tls else "curl"
            say(f"dashboard  {home}/")
            say(f"publish  {curl} {base} -H 'content-type: text/plain' -d 'hello, world'")
            say(f"read     {curl} {base}")
        if beside is not None:
            say(f"demo     {beside.text}")
        say("ready")

    def stopping(self) -> None:
        self._say("stopping")

    def stopped(self) -> None:
        self._say("stopped; everything is on disk")

    def gave_up(self) -> None:
        self._say("stopped before it was ready; nothing is lost, the next start begins again")

    def _say(self, line: str) -> None:
        self._out.write(line + "\n")


class _JsonSpeaker:
    """For programs: an object a line, each with its event."""

    def __init__(self, out: NonBlockingOutput) -> None:
        self._out = out

    def greet(self, server: Server, seconds: float, beside: Beside | None) -> None:
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
            recovery=broker.report,
        )

    def stopping(self) -> None:
        self._say("stopping")

    def stopped(self) -> None:
        self._say("stopped")

    def gave_up(self) -> None:
        self._say("gave_up")

    def _say(self, event: str, **facts: object) -> None:
        self._out.write(msgspec.json.encode({"event": event, **facts}).decode() + "\n")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _allow_many_files() -> None:
    """Connections and segments are open files; the usual soft limit of 1,024 is a leftover of select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tune_garbage_collection() -> None:
    gc.collect()
    gc.freeze()  # what is there after the start stays: no need to look at it again
    gc.set_threshold(*GC_THRESHOLDS)


def _watch_garbage_collection(broker: Broker) -> None:
    """How long collections hold the loop, for /metrics."""
    began = 0.0

    def watch(phase: str, _: object) -> None:
        nonlocal began
        if phase == "start":
            began = broker.clock.monotonic()
        else:
            broker.stats.gc_pause_s.observe(broker.clock.monotonic() - began)

    gc.callbacks.append(watch)


class _TextFormat(logging.Formatter):
    """One line per event, whatever a client put into a name."""

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
