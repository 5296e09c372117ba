"""Programs of other projects, fetched once and found again by their paths.

Several processes run the tests: one of them fetches, the others wait for it and never see the half of it.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.java import QUICK_JAVA

KAFKA_VERSION = "4.3.1"
KAFKA_VERSION_OLD = "2.8.2"  # of 2021
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace-tests"
FETCH_SECONDS_MAX = BUILD_SECONDS_MAX = 240  # of what Maven fetches, and go fetches and builds: less than a test has
JAVA = ("java", "-Xmx256m", *QUICK_JAVA)
JAVA_SECONDS_MAX = 240  # a busy machine is slow, not wrong

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>headrace</groupId><artifactId>jars</artifactId><version>1</version><dependencies>
{dependencies}
</dependencies></project>
"""
DEPENDENCY = (
    "<dependency><groupId>{0}</groupId><artifactId>{1}</artifactId><version>{2}</version>"
    "<exclusions>{3}</exclusions></dependency>"
)


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """No other process fetches this meanwhile."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def folder_of(name: str, whole: str, fill: Callable[[Path], None]) -> Path:
    """The folder of this name, in which this path is; filled, if it is not there, under another name."""
    kept = CACHE / name
    with alone(name):
        if not (kept / whole).exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as unfinished:
                fill(Path(unfinished) / name)
                shutil.rmtree(kept, ignore_errors=True)
                (Path(unfinished) / name).rename(kept)
    return kept


def classpath(name: str, *artifacts: str, bare: bool = False) -> str:
    """The jars of group:artifact:version and of all they need (not, if bare). Skips, loudly, if they can not
    be had."""
    with alone(name):
        return _classpath(name, artifacts, bare)


def _classpath(name: str, artifacts: tuple[str, ...], bare: bool) -> str:
    kept = CACHE / f"{name}.classpath"
    if kept.exists():
        found = kept.read_text()
        if found and all(Path(jar).exists() for jar in found.split(":")):
            return found
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            pytest.skip(f"SKIPPED FOR WANT OF {program}: {', '.join(artifacts)}")
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    everything = "<exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>" if bare else ""
    dependencies = "\n".join(DEPENDENCY.format(*one.split(":"), everything) for one in artifacts)
    (folder / "pom.xml").write_text(POM.format(dependencies=dependencies))
    command = ["mvn", "-q", "-B", "dependency:build-classpath", f"-Dmdep.outputFile={folder / 'classpath'}"]
    done = run_in(folder, command, FETCH_SECONDS_MAX, f"Maven Central did not give {', '.join(artifacts)}")
    if done.returncode != 0:
        reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), done.stdout[-200:])
        pytest.skip(f"SKIPPED: Maven Central did not give {', '.join(artifacts)}: {reason[:300]}")
    (folder / "classpath").rename(kept)
    return kept.read_text()


def run_in(folder: Path, command: list[str], seconds_max: float, failing: str) -> "subprocess.CompletedProcess[str]":
    """Skips, and says what was `failing`, when it takes too long."""
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds_max, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"SKIPPED: {failing} in {seconds_max} s")


def pip_gives(package: str, *options: str) -> Path:
    """A folder with a package that this Python need not be able to import."""

    def install(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *options]
        done = subprocess.run([*command, package], capture_output=True, text=True, timeout=240, check=False)
        if done.returncode != 0:
            pytest.skip(f"SKIPPED: pip did not give {package}: {done.stderr[-200:]}")

    return folder_of(package.replace("==", "-"), ".", install)


def kafkajs(version: str) -> Path:
    """The folder of Node's modules with KafkaJS in it."""
    return npm_gives("kafkajs", version)


def npm_gives(package: str, version: str) -> Path:
    """The folder of Node's modules with this one in it."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"SKIPPED FOR WANT OF {program}: {package} {version}")

    def install(folder: Path) -> None:
        folder.mkdir()
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{package}@{version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode != 0:
            pytest.skip(f"SKIPPED: npm did not give {package} {version}: {done.stderr[-200:]}")

    name = f"{package.replace('/', '-')}-{version}"
    return folder_of(name, f"node_modules/{package}", install) / "node_modules"


def go_program(source: Path) -> Path:
    """What go builds of this folder."""
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        pytest.skip(f"SKIPPED FOR WANT OF go: {source.name}")
    files = sorted(source.iterdir())
    version = hashlib.sha256(b"".join(one.read_bytes() for one in files)).hexdigest()[:12]

    def build(folder: Path) -> None:
        command = [go, "build", "-o", str(folder / source.name), "."]
        done = run_in(source, command, BUILD_SECONDS_MAX, f"go did not build {source.name}")
        if done.returncode != 0:
            pytest.skip(f"SKIPPED: go did not build {source.name}: {done.stderr[-300:]}")

    return folder_of(f"{source.name}-{version}", source.name, build) / source.name


def kafka_tools(version: str = KAFKA_VERSION) -> str:
    artifacts = ("kafka_2.13", "kafka-tools")
    return classpath(f"kafka-{version}", *(f"org.apache.kafka:{name}:{version}" for name in artifacts))


def run_java(jars: str, *command: str, stdin: str = "") -> str:
    """A class or a source file with its arguments; what it printed."""
    java = [*JAVA, "-cp", jars, *command]
    done = subprocess.run(java, input=stdin, capture_output=True, text=True, timeout=JAVA_SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception" not in done.stdout, done.stdout
    return done.stdout
