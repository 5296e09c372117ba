"""Jars of other projects from Maven Central, fetched once by mvn and found again by their paths."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

KAFKA_VERSION = "4.3.1"
KAFKA_VERSION_OLD = "2.8.2"  # of 2021
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace-tests"
FETCH_SECONDS_MAX = 600

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>headrace</groupId><artifactId>jars</artifactId><version>1</version><dependencies>
{dependencies}
</dependencies></project>
"""
DEPENDENCY = (
    "<dependency><groupId>{0}</groupId><artifactId>{1}</artifactId><version>{2}</version>"
    "<exclusions>{3}</exclusions></dependency>"
)


def classpath(name: str, *artifacts: str, bare: bool = False) -> str:
    """The jars of group:artifact:version and of all they need (not, if bare). Skips, loudly, if they can not
    be had."""
    kept = CACHE / f"{name}.classpath"
    if kept.exists():
        found = kept.read_text()
        if all(Path(jar).exists() for jar in found.split(":")):
            return found
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            pytest.skip(f"SKIPPED FOR WANT OF {program}: {', '.join(artifacts)}")
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    everything = "<exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>" if bare else ""
    dependencies = "\n".join(DEPENDENCY.format(*one.split(":"), everything) for one in artifacts)
    (folder / "pom.xml").write_text(POM.format(dependencies=dependencies))
    command = ["mvn", "-q", "-B", "dependency:build-classpath", f"-Dmdep.outputFile={kept}"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"SKIPPED: Maven Central did not give {', '.join(artifacts)} in {FETCH_SECONDS_MAX} s")
    if done.returncode != 0:
        reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), done.stdout[-200:])
        pytest.skip(f"SKIPPED: Maven Central did not give {', '.join(artifacts)}: {reason[:300]}")
    return kept.read_text()


def kafka_tools(version: str = KAFKA_VERSION) -> str:
    artifacts = ("kafka_2.13", "kafka-tools")
    return classpath(f"kafka-{version}", *(f"org.apache.kafka:{name}:{version}" for name in artifacts))


def run_java(jars: str, *command: str, stdin: str = "") -> str:
    """A class or a source file with its arguments; what it printed."""
    java = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", jars, *command]
    done = subprocess.run(java, input=stdin, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception" not in done.stdout, done.stdout
    return done.stdout
