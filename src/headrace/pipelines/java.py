"""Is there a PySpark, and a Java that it can use? Asked before Spark is started, so that the answer is one sentence."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from headrace.errors import HeadraceError

OLDEST = 17
ASK_S_MAX = 30.0


class JavaMissing(HeadraceError):
    """Spark runs on Java, and there is none, or one that is too old."""


class SparkMissing(HeadraceError):
    """What was asked for is done with PySpark, which is installed only with the extra `spark`."""


def has_pyspark() -> bool:
    return find_spec("pyspark") is not None


def check_pyspark() -> None:
    if not has_pyspark():
        raise SparkMissing("PySpark is not installed: pip install 'headrace[spark]'")


def java_command() -> str | None:
    """The java that Spark's launcher would take: JAVA_HOME first, then the PATH."""
    home = os.environ.get("JAVA_HOME")
    if home:
        command = Path(home, "bin", "java")
        return str(command) if command.exists() else None
    return shutil.which("java")


def check_java() -> int:
    """The major version; JavaMissing in a sentence that says what to do."""
    command = java_command()
    if command is None:
        where = "JAVA_HOME points to no Java" if os.environ.get("JAVA_HOME") else "there is no java on the PATH"
        raise JavaMissing(
            f"Spark needs Java {OLDEST} or newer and {where}; install one (Debian: apt install openjdk-17-jre-headless)"
        )
    try:
        answer = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=ASK_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaMissing(f"{command} cannot be run: {error}") from None
    version = parse_version(answer.stderr + answer.stdout)
    if version is None or version < OLDEST:
        said = "says nothing of its version" if version is None else f"is Java {version}"
        raise JavaMissing(f"Spark needs Java {OLDEST} or newer and {command} {said}; JAVA_HOME chooses another one")
    return version


def parse_version(text: str) -> int | None:
    """17 from `openjdk version "17.0.15"`, 8 from `java version "1.8.0_292"`."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if match is None:
        return None
    return int(match[2] or 0) if match[1] == "1" else int(match[1])
