"""A build that cannot succeed names what is missing, in one sentence."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parent.parent / "setup.py"
NO_HEADERS = (
    "import runpy, sys, sysconfig; real = sysconfig.get_path; "
    "sysconfig.get_path = lambda name, *rest: '/nowhere' if name == 'include' else real(name, *rest); "
    "sys.argv = ['setup.py', '-q', 'build_ext']; runpy.run_path('setup.py', run_name='__main__')"
)


@pytest.mark.parametrize(
    ("command", "compiler", "sentence"),
    [
        (["setup.py", "-q", "build_ext"], "/nowhere/cc", "headrace: no C compiler: '/nowhere/cc' was not found."),
        (["-c", NO_HEADERS], "/bin/false", "headrace: Python's headers are missing: there is no Python.h in /nowhere."),
        (["setup.py", "-q", "build_ext"], "/bin/false", "headrace: '/bin/false' could not compile a kernel:"),
    ],
)
def test_a_build_without_its_requirements_reports_them(
    tmp_path: Path, command: list[str], compiler: str, sentence: str
) -> None:
    shutil.copy(SETUP, tmp_path)
    kernel = tmp_path / "src" / "headrace" / "kernel.pyx"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("cdef int one = 1\n")
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=os.environ | {"CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in done.stderr
