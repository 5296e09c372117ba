"""One minute of libFuzzer with AddressSanitizer over the record kernels. HEADRACE_FUZZ_SECONDS changes the duration."""

import os
import re
from pathlib import Path

import pytest
from fuzz.record import MissingTool, fuzz

SECONDS = int(os.environ.get("HEADRACE_FUZZ_SECONDS", 60))


@pytest.mark.slow
@pytest.mark.timeout(900)  # generous for a busy machine: the kernels are compiled first
def test_coverage_guided_fuzzing_finds_no_crash(tmp_path: Path) -> None:
    try:
        done = fuzz(tmp_path / "fuzz", SECONDS)
    except MissingTool as missing:
        pytest.skip(f"fuzzing the record kernels needs {missing}")
    assert done.returncode == 0, done.stderr[-6000:]
    executed = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    assert executed, done.stderr[-2000:]
    print(f"{int(executed[1]):,} inputs in {SECONDS} s, {covered[-1]} edges")
    assert int(covered[-1]) > 500, "the kernels are not instrumented"
