"""Fuzzes the record kernels with libFuzzer and AddressSanitizer: python -m fuzz.record --seconds 60

Builds instrumented kernels in a separate folder, and a program that embeds Python and loads them. A finding (a crash,
an over-read, two results that contradict each other) ends the run with a trace and leaves the input as crash-*; run the
program on that file to reproduce it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "src" / "headrace" / "record"
COMPILER = "clang"
SANITIZE = ["-O1", "-gline-tables-only", "-fno-omit-frame-pointer", "-fno-strict-aliasing", "-Wno-everything"]
INPUT_BYTES_MAX = 4096
NOT_REACHED = {"arrow/write"}  # it only writes: no fuzzed input reaches it
TARGET = """
from exercise import exercise

def one(data):
    try:
        exercise(data)
    finally:
        data.release()
"""


class MissingTool(Exception):
    """Something the fuzzer is built with is not installed; the message names it."""


def build(folder: Path) -> Path:
    """The fuzzer's program, built in folder. Raises MissingTool."""
    check_tools(folder)
    package = folder / "headrace"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    shutil.copy(ROOT / "src" / "headrace" / "errors.py", package)
    for source in RECORD.rglob("*.py"):
        copy = package / "record" / source.relative_to(RECORD)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    shutil.copy(ROOT / "tests" / "record" / "exercise.py", folder)
    (folder / "fuzz_target.py").write_text(TARGET)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    include = f"-I{sysconfig.get_path('include')}"

    def compile_kernel(kernel: Path) -> None:
        c_file = c_of(kernel, folder)
        out = (package / "record" / kernel.relative_to(RECORD)).with_name(f"{kernel.stem}{suffix}")
        options = ["-fsanitize=address,fuzzer-no-link", "-shared", "-fPIC", include]
        run(COMPILER, *SANITIZE, *options, str(c_file), "-o", str(out))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_kernel, kernels()))
    program = folder / "fuzz-record"
    library = sysconfig.get_config_var("LIBDIR")
    version = sysconfig.get_config_var("LDVERSION")
    run(
        COMPILER,
        *SANITIZE,
        "-fsanitize=address,fuzzer",
        "-rdynamic",
        include,
        str(ROOT / "fuzz" / "target.c"),
        f"-L{library}",
        f"-Wl,-rpath,{library}",
        f"-lpython{version}",
        "-lm",
        "-ldl",
        "-o",
        str(program),
    )
    return program


def kernels() -> list[Path]:
    found = sorted(RECORD.rglob("*.pyx"))
    return [kernel for kernel in found if str(kernel.relative_to(RECORD).with_suffix("")) not in NOT_REACHED]


def c_of(kernel: Path, folder: Path) -> Path:
    """The C file that the installation generated, if no source has changed since; otherwise a new one."""
    made = kernel.with_suffix(".c")
    sources = [path for ending in ("*.pyx", "*.pxd") for path in RECORD.rglob(ending)]
    if made.exists() and made.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
        return made
    made = folder / f"{kernel.parent.name}-{made.name}"
    run(sys.executable, "-m", "cython", "-3", "-I", str(ROOT / "src"), str(kernel), "-o", str(made))
    return made


def check_tools(folder: Path) -> None:
    if shutil.which(COMPILER) is None:
        raise MissingTool(f"{COMPILER} (Debian: apt-get install clang)")
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / "probe.c"
    probe.write_text("int LLVMFuzzerTestOneInput(const char *d, long n) { return d == 0 && n; }\n")
    command = [COMPILER, "-fsanitize=address,fuzzer", str(probe), "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise MissingTool("the runtime of libFuzzer and AddressSanitizer (Debian: apt-get install libclang-rt-14-dev)")
    library = Path(str(sysconfig.get_config_var("LIBDIR")))
    if not list(library.glob(f"libpython{sysconfig.get_config_var('LDVERSION')}.*")):
        raise MissingTool("libpython to embed (Debian: apt-get install python3-dev)")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def seeds() -> Iterator[bytes]:
    """A few good batches of every codec; the fuzzer makes bad ones of them."""
    from headrace.record.codec import build as build_batch
    from headrace.record.codec import patch

    small = [
        (b"key", b"value", [("name", b"x"), ("", None)], 1000),
        (None, None, [], 999),
        (b"", b"", [], 2000),
    ]
    large = [(b"key-%d" % i, b"value " * 20, [("h", b"y" * 5)], i) for i in range(20)]
    for records in (small, large):
        for codec in range(5):
            batch = build_batch(records, codec=codec)
            second = bytearray(batch)
            patch(second, 0, len(records), 0)
            for data in (bytes(batch), bytes(batch + second)):
                yield b"\x00" + data
                yield b"\x07" + data


def fuzz(folder: Path, seconds: int) -> subprocess.CompletedProcess[str]:
    """Build, write the seeds, and let it run. The result has a non-zero return code when it found something."""
    program = build(folder)
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    environment = {
        **os.environ,
        "FUZZ_PYTHON": sys.executable,
        "PYTHONPATH": str(folder),
        # Objects come from malloc, so that the sanitizer sees where each ends.
        "PYTHONMALLOC": "malloc",
        # Python does not free everything at exit, which the leak detector would report.
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    return subprocess.run(
        [
            str(program),
            str(corpus),
            f"-max_total_time={seconds}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-artifact_prefix={folder}/",
            "-rss_limit_mb=1500",
            "-malloc_limit_mb=600",
            "-timeout=120",  # of a clock that goes on while others have the machine
            "-print_final_stats=1",
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the record kernels with libFuzzer and AddressSanitizer.")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz-record")
    options = parser.parse_args()
    try:
        done = fuzz(options.folder, options.seconds)
    except MissingTool as missing:
        print(f"missing: {missing}", file=sys.stderr)
        return 2
    print(done.stderr[-4000:])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
