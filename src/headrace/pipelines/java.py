"""Checks for PySpark and Java before Spark starts, so that a missing one is reported in one sentence."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from headrace.errors import HeadraceError

OLDEST = 17
VERSION_TIMEOUT_S = 30.0


class JavaMissing(HeadraceError):
    """Java, which Spark needs, is missing or too old."""


class SparkMissing(HeadraceError):
    """PySpark is not installed; it comes with the extra `spark`."""


def has_pyspark() -> bool:
    return find_spec("pyspark") is not None


def check_pyspark() -> None:
    if not has_pyspark():
        raise SparkMissing("PySpark is not installed: pip install 'headrace[spark]'")


def java_command() -> str | None:
    """The java command that Spark's launcher would use: from JAVA_HOME, or else from the PATH."""
    home = os.environ.get("JAVA_HOME")
    if home:
        command = Path(home, "bin", "java")
        return str(command) if command.exists() else None
    return shutil.which("java")


def check_java() -> int:
    """The major version of Java. Raises JavaMissing with advice."""
    command = java_command()
    if command is None:
        where = "JAVA_HOME has no bin/java" if os.environ.get("JAVA_HOME") else "there is no java on the PATH"
        raise JavaMissing(
            f"Spark needs Java {OLDEST} or newer, but {where}; install it (Debian: apt install openjdk-17-jre-headless)"
        )
    try:
        answer = subprocess.run(
            [command, "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaMissing(f"{command} cannot be run: {error}") from None
    version = parse_version(answer.stderr + answer.stdout)
    if version is None or version < OLDEST:
        found = "does not report its version" if version is None else f"is Java {version}"
        raise JavaMissing(f"Spark needs Java {OLDEST} or newer, but {command} {found}; set JAVA_HOME to another one")
    return version


def parse_version(text: str) -> int | None:
    """17 from `openjdk version "17.0.15"`, 8 from `java version "1.8.0_292"`."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if match is None:
        return None
    return int(match[2] or 0) if match[1] == "1" else int(match[1])
