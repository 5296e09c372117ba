"""The house of docs/concepts.md as a test: imports point down, and rules that prose would not hold."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "headrace"

MAY_IMPORT = {
    "__init__": ("version", "client", "embedded", "record", "errors"),
    "__main__": ("cli",),
    "version": (),
    "errors": (),
    "clock": (),
    "allocator": (),
    "nonblocking_stdio": (),
    "config": ("errors", "log.settings"),
    "record": ("errors",),
    "log": ("errors", "clock", "config", "record"),
    "embedded": ("errors", "clock", "config", "record", "log"),
    "wire": ("errors", "record"),
    "schemas": ("errors",),
    "broker": ("errors", "clock", "allocator", "config", "record", "log", "schemas"),
    "listeners": ("errors", "clock", "config", "record", "wire", "schemas", "broker", "version"),
    "client": ("errors", "record", "wire", "version"),
    "spark": (
        "errors",
        "allocator",
        "record",
        "client",
        "log.read.external",
        "log.commit.slots",
        "log.disk.paths",
        "log.catalog.document",
    ),
    "pipelines": ("errors", "record", "spark", "client", "log", "config"),
    "demo": ("errors", "record", "wire.amqp", "client", "pipelines"),
    "server": (
        *("errors", "clock", "allocator", "config", "record", "log", "wire", "broker", "listeners"),
        *("version", "nonblocking_stdio"),
    ),
    "cli": (
        *("errors", "clock", "config", "record", "log", "broker.access.offline", "broker.routing.exchanges"),
        *("server", "client", "pipelines", "demo", "version", "nonblocking_stdio"),
    ),
}

CYTHON = re.compile(r"^\s*(?:from\s+headrace\.(\S+)\s+c?import|c?import\s+headrace\.(\S+))", re.M)
RELATIVE = re.compile(r"^\s*from\s+\.", re.M)

# Who may touch what the rest must be handed.
ONLY = {
    "asyncio": ("broker", "listeners", "client", "server", "cli", "demo"),
    "pyspark": ("spark", "pipelines", "cli", "demo"),
    "time": ("clock", "cli", "pipelines", "spark", "client"),
    "socket": ("listeners", "client", "server", "cli"),
}
LINES_MAX = 650


def sources() -> Iterator[tuple[str, Path]]:
    for path in sorted(p for p in SRC.rglob("*") if p.suffix in {".py", ".pyx", ".pxd"}):
        yield path.relative_to(SRC).parts[0].removesuffix(".py"), path


def imported(path: Path) -> set[str]:
    text = path.read_text()
    if path.suffix != ".py":
        ours = {f"headrace.{a or b}" for a, b in CYTHON.findall(text)}
        return ours | set(re.findall(r"^\s*(?:import|from)\s+(\w+)", text, re.M))
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_down() -> None:
    wrong = []
    for layer, path in sources():
        allowed = (*MAY_IMPORT[layer], layer)  # a new layer must be named above first
        if RELATIVE.search(path.read_text()):
            wrong.append(f"{path.relative_to(SRC)} uses a relative import: say headrace.x, so that this test reads it")
        for name in imported(path):
            if not name.startswith("headrace."):
                continue
            inner = name.removeprefix("headrace.")
            if inner == "__version__":
                continue
            if not any(inner == ok or inner.startswith(ok + ".") for ok in allowed):
                wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_listeners_do_not_know_each_other() -> None:
    wrong = []
    for layer, path in sources():
        if layer != "listeners" or len(path.relative_to(SRC).parts) < 3:
            continue
        listener = path.relative_to(SRC).parts[1]
        for name in imported(path):
            match = re.match(r"headrace\.(?:listeners|wire)\.(amqp|kafka|http)\b", name)
            if match and match[1] != listener:
                wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_time_sockets_and_frameworks_stay_in_their_rooms() -> None:
    wrong = []
    for layer, path in sources():
        for name in imported(path):
            owners = ONLY.get(name.split(".")[0])
            if owners is not None and layer not in owners:
                wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_only_the_disk_module_touches_files_of_the_log() -> None:
    changes = r"\bos\.(?:open|fsync|fdatasync|rename|replace|unlink|pwrite|pread|ftruncate|truncate)\("
    calls = re.compile(changes + r"|(?:^|[=(\[,]|with|return|yield|in)\s*open\(", re.M)
    wrong = [
        f"{path.relative_to(SRC)}: {match[0]}"
        for layer, path in sources()
        if layer in {"record", "log", "broker", "wire", "listeners"} and path.name != "disk.py"
        for match in [calls.search(path.read_text())]
        if match
    ]
    assert not wrong, "\n".join(wrong)


def test_every_kernel_has_a_typed_face() -> None:
    missing = [p for _, p in sources() if p.suffix == ".pyx" and not p.with_suffix(".pyi").exists()]
    assert not missing, missing


def test_no_room_outgrows_itself() -> None:
    big = [(len(p.read_text().splitlines()), str(p.relative_to(SRC))) for _, p in sources()]
    assert not [entry for entry in big if entry[0] > LINES_MAX], sorted(big)[-3:]
