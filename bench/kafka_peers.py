"""The brokers of bench/kafka.py: ours, and a real Apache Kafka from the jars of Maven Central.

Each in two kinds: with a sync before every acknowledgement, and from the page cache. Ours does the first unless told
otherwise, Kafka the second. And two that are none: kafka_nothing.c, what is left when a broker costs nothing, and
kafka_plain.c, what is left when it only keeps the promise of an acknowledgement.
"""

import glob
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port

from bench.cores import Cores

KAFKA_VERSION = "4.3.1"
OURS, OURS_CACHED = "headrace", "headrace, page cache"
KAFKA, KAFKA_FLUSH = "kafka", "kafka, flush per batch"
NOTHING, PLAIN = "nothing", "plain C"
HEAP = ("-Xmx1G", "-Xms1G")  # kafka-server-start.sh's
JVM = (
    "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent", "-Djava.awt.headless=true",
)  # fmt: skip
START_SECONDS_MAX = 60
LOAD, RAW = "kafka_load", "kafka_raw"  # sources beside this file
NOTHING_PROGRAM, PLAIN_PROGRAM = "kafka_nothing", "kafka_plain"
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>headrace</groupId><artifactId>bench</artifactId><version>1</version><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{0}</version></dependency>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>{0}</version></dependency>
</dependencies></project>"""


class Broker:
    """A broker in a process of its own."""

    name = ""
    durability = ""
    small_share = 1.0  # of the rows with small batches: what needs a sync for each of them has not all day
    keeps_messages = True  # in files, for whose pages memory is warmed

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bench-kafka-"))
        self.port = 0
        self.cores = Cores()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        self.port = free_port()  # not earlier, because another process could take the port
        command = self.cores.for_broker(self.command())
        with open(self.folder / "output.txt", "ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, cwd=self.folder
            )
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self.folder / "output.txt").read_text()[-2000:]
                raise RuntimeError(f"{self.name} did not start (exit code {self._process.poll()}):\n{said}")
            time.sleep(0.05)
        time.sleep(1.0)  # what starts after the listener

    @contextmanager
    def running(self) -> Iterator[None]:
        print(f"\n{self.name}: {self.durability}", flush=True)
        self.start()
        try:
            yield
        finally:
            self.stop()

    def make_topic(self, name: str) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        for made in admin.create_topics([NewTopic(name, 1, 1)]).values():
            made.result()

    def drop_topic(self, name: str) -> None:
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        for gone in admin.delete_topics([name]).values():
            gone.result()

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def cpu_s(self) -> float:
        assert self._process is not None
        total = 0
        for path in glob.glob(f"/proc/{self._process.pid}/task/*/schedstat"):
            try:
                total += int(Path(path).read_text().split()[0])
            except OSError:
                continue  # a thread that ended meanwhile
        return total / 1e9

    def pss_mb(self) -> float:
        assert self._process is not None
        for line in Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
        return 0.0


class Headrace(Broker):
    def __init__(self, *, sync: bool = True) -> None:
        super().__init__()
        self._sync = sync
        self.name = OURS if sync else OURS_CACHED
        self.durability = "fdatasync before every acknowledgement" if sync else "page cache (--durability os)"

    def command(self) -> list[str]:
        serve = [sys.executable, "-c", "import headrace.cli; headrace.cli.main()", "serve"]
        listeners = ["--kafka", self.address, "--http", "off", "--amqp", "off"]
        return [*serve, "--data-dir", "data", *listeners, "--durability", "sync" if self._sync else "os"]


class Program(Broker):
    """In C, and no broker: there are no topics, and nothing that gets faster as it runs."""

    def __init__(self, programs: Path) -> None:
        super().__init__()
        self._programs = programs

    def make_topic(self, name: str) -> None:
        """There are none."""

    def drop_topic(self, name: str) -> None:
        """There are none."""


class Nothing(Program):
    name = NOTHING
    durability = "none: it answers without a look, which leaves what the client and the machine take by themselves"
    keeps_messages = False

    def command(self) -> list[str]:
        return [str(self._programs / NOTHING_PROGRAM), str(self.port)]


class Plain(Program):
    name = PLAIN
    durability = "fdatasync before every acknowledgement, and nothing else"

    def command(self) -> list[str]:
        return [str(self._programs / PLAIN_PROGRAM), str(self.port), str(self.folder / "data")]

    def drop_topic(self, name: str) -> None:
        """All that it keeps is one file, which it begins anew with what comes next."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)


class ApacheKafka(Broker):
    """KRaft, one node, combined roles, default settings but for what one node needs."""

    def __init__(self, classpath: str, *, flush: bool) -> None:
        super().__init__()
        self._classpath = classpath
        self._flush = flush
        self.name = KAFKA_FLUSH if flush else KAFKA
        self.durability = "page cache (Kafka's default)"
        if flush:
            self.durability = "fsync before every acknowledgement; a quarter of the paced and java messages"
            self.small_share = 0.25

    def command(self) -> list[str]:
        controller = free_port()
        properties = self.folder / "server.properties"
        lines = [
            "process.roles=broker,controller",
            "node.id=1",
            f"controller.quorum.voters=1@127.0.0.1:{controller}",
            f"listeners=PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}",
            f"advertised.listeners=PLAINTEXT://{self.address}",
            "controller.listener.names=CONTROLLER",
            f"log.dirs={self.folder}/data",
            "offsets.topic.replication.factor=1",
            "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1",
            "group.initial.rebalance.delay.ms=0",
        ]
        if self._flush:
            lines.append("log.flush.interval.messages=1")
        properties.write_text("\n".join(lines) + "\n")
        format_ = ["kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qk", "-c", str(properties)]
        subprocess.run([*self._java(), *format_], check=True, capture_output=True, cwd=self.folder)
        return [*self._java(), *HEAP, *JVM, "kafka.Kafka", str(properties)]

    def _java(self) -> list[str]:
        return ["java", "-cp", self._classpath]


def kafka_classpath() -> str:
    """Raises with the reason if Maven Central, mvn or java can not be had."""
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            raise RuntimeError(f"no {program}")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace-tests"
    kept = cache / f"kafka-{KAFKA_VERSION}.classpath"
    if not kept.exists():
        folder = cache / f"kafka-{KAFKA_VERSION}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pom.xml").write_text(POM.format(KAFKA_VERSION))
        command = ["mvn", "-q", "-B", "dependency:build-classpath", f"-Dmdep.outputFile={kept}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"Maven Central did not give Kafka's jars: {done.stdout[-300:]}")
    return kept.read_text()


def kafkas(*, flush: Sequence[bool]) -> list[Broker]:
    """None, and said so, where there is no Kafka to be had."""
    try:
        classpath = kafka_classpath()
    except RuntimeError as error:
        print(f"NO APACHE KAFKA TO COMPARE WITH: {error}", flush=True)
        return []
    return [ApacheKafka(classpath, flush=one) for one in flush]


def programs_that_are_none(folder: Path) -> list[Program]:
    """Those of the two that can be had here, built."""
    build(folder, NOTHING_PROGRAM)
    if platform.machine() != "x86_64":
        print(f"NO PLAIN C: it takes the checksum instruction of x86-64, and this is {platform.machine()}", flush=True)
        return [Nothing(folder)]
    build(folder, PLAIN_PROGRAM, "-msse4.2", "-lpthread", "-ldl")
    return [Nothing(folder), Plain(folder)]


def build(folder: Path, program: str, *options: str) -> None:
    source = Path(__file__).parent / f"{program}.c"
    subprocess.run(["cc", "-O2", "-o", str(folder / program), str(source), *options], check=True)


def build_load(folder: Path) -> None:
    """kafka_load, linked with the librdkafka that confluent-kafka's wheel brings, and kafka_raw."""
    import confluent_kafka

    build(folder, RAW)
    libraries = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    [library] = libraries.glob("librdkafka-*.so*")
    build(folder, LOAD, str(library), "-lpthread", f"-Wl,-rpath,{libraries}", "-Wl,--allow-shlib-undefined")
