"""How the suite itself is divided, which decides how long it takes and what may stand beside what."""

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.listing import listed

ROOT = Path(__file__).parent.parent
FILES = ("tests/spark/test_a.py", "tests/pipelines/test_b.py", "tests/test_c.py", "tests/test_d.py")
TEST = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
def test_one(number, request):
    with open("ran.txt", "a") as ran:
        ran.write(f"{request.node.path.name} {os.getpid()}\\n")
"""


def test_the_tests_of_a_file_stay_in_one_process_and_all_of_spark_does(tmp_path: Path) -> None:
    """They share a broker or a session, and some go on from what the one before them did."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "tests.conftest", "-n", "2", "tests"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    processes: dict[str, set[str]] = defaultdict(set)
    lines = (tmp_path / "ran.txt").read_text().splitlines()
    assert len(lines) == 6 * len(FILES)
    for name, process in map(str.split, lines):
        processes[name].add(process)
    assert all(len(found) == 1 for found in processes.values()), processes
    assert processes["test_a.py"] == processes["test_b.py"], "one session of Spark"
    assert processes["test_a.py"] != processes["test_c.py"], "the rest does not wait for it"


def test_the_test_files_that_start_first_exist() -> None:
    assert [path for path in LONGEST if path != "spark" and not (ROOT / path).is_file()] == []


def test_no_test_walks_the_folder_of_a_running_broker_with_pathlib() -> None:
    """`Path.glob` and `rglob` raise where the broker removes a folder meanwhile: see tests/listing.py."""
    beside_brokers = ("interop", "pipelines", "spark", "crash", "listeners")
    found = [
        f"{path.relative_to(ROOT)}: {call}"
        for folder in beside_brokers
        for path in sorted((ROOT / "tests" / folder).rglob("*.py"))
        for call in (".glob(", ".rglob(")
        if call in path.read_text()
    ]
    assert found == []


def test_a_folder_that_is_removed_while_it_is_listed_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/interop/kafka/test_tier.py failed in one run of many, where the broker deleted the folder it looked at."""
    for name in ("gone", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.parquet").touch()
    scan = os.scandir

    def remove_first(path: str | Path) -> object:
        if str(path) == str(tmp_path / "gone"):  # `rmtree` itself walks by descriptors
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        return scan(path)

    monkeypatch.setattr(os, "scandir", remove_first)
    assert listed(tmp_path, "**/*.parquet") == [tmp_path / "kept" / "a.parquet"]
