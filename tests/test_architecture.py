"""The architecture of docs/architecture.md as a test: imports point down, and other rules that prose cannot enforce."""

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
    "config": ("errors", "log.settings"),  # the structs of storage settings; log does not import config
    "record": ("errors",),
    "log": ("errors", "clock", "record"),
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

# Modules that may use what all others must receive as an argument.
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


def test_listeners_use_partitions_and_storage_not_logs_and_shards() -> None:
    """`Partition` is the port to a log, `Storage` and `Pressure` to everything shard-wide."""
    dereference = re.compile(r"\.(?:log|shard)\b(?!\()")  # not logger.log(...)
    wrong = [
        f"{path.relative_to(SRC)}:{number}: {line.strip()}"
        for layer, path in sources()
        if layer == "listeners"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if dereference.search(line.split("#")[0])
    ]
    assert not wrong, "\n".join(wrong)


def test_every_kernel_has_a_typed_face() -> None:
    missing = [p for _, p in sources() if p.suffix == ".pyx" and not p.with_suffix(".pyi").exists()]
    assert not missing, missing


def test_no_source_file_exceeds_the_line_limit() -> None:
    big = [(len(p.read_text().splitlines()), str(p.relative_to(SRC))) for _, p in sources()]
    assert not [entry for entry in big if entry[0] > LINES_MAX], sorted(big)[-3:]


# The order inside the large packages: a sub-package may import only from those on earlier lines and from itself.
# Imports under TYPE_CHECKING count: a type that points up is a dependency, too.
ORDER = {
    "record": (
        ("layout", "raw", "siphash"),
        ("batch_layout",),
        ("types",),
        ("compression",),
        ("amqp",),
        ("batch",),
        ("arrow",),
        ("codec",),
    ),
    "log": (
        ("settings", "counters", "write_mode"),
        ("status",),
        ("disk",),
        ("standby",),
        ("segments",),
        ("tier",),
        ("state",),
        ("commit",),
        ("read",),
        ("log",),
        ("maintenance",),
        ("recovery",),
        ("catalog",),
        ("shard",),
        ("memory",),
    ),
    "broker": (
        ("catalog", "cooperative", "clients", "types"),
        ("access",),
        ("streams",),
        ("groups",),
        ("transactions",),
        ("routing",),
        ("queues",),
        ("vhosts",),
        ("coordination",),
        ("sinks", "schemas", "pressure", "standbys", "storage"),
        ("metrics",),
        ("upkeep",),
        ("broker",),
    ),
}
# "importing file -> imported sub-package": why it is allowed. This table may only shrink.
UPWARD: dict[str, str] = {
    "record/batch_layout.pxd -> record.batch": "inline functions for batch headers compute the CRC of batch/crc32c.pxd",
}


def test_imports_point_down_inside_the_packages() -> None:
    wrong, used = [], set()
    for package, order in ORDER.items():
        rank = {part: index for index, parts in enumerate(order) for part in parts}
        for path in sorted((SRC / package).rglob("*")):
            if path.suffix not in {".py", ".pyx", ".pxd"} or (path.parent == SRC / package and path.stem == "__init__"):
                continue
            own = path.relative_to(SRC / package).parts[0].partition(".")[0]
            assert own in rank, f"{package}/{own} has no place in ORDER"
            for name in imported(path):
                if not name.startswith(f"headrace.{package}."):
                    continue
                other = name.split(".")[2]
                if other != own and rank[other] >= rank[own]:
                    edge = f"{path.relative_to(SRC)} -> {package}.{other}"
                    used.add(edge)
                    if edge not in UPWARD:
                        wrong.append(edge)
    assert not wrong, "\n".join(sorted(set(wrong)))
    assert not UPWARD.keys() - used, f"no longer needed: {sorted(UPWARD.keys() - used)}"


METHODS_MAX, ATTRIBUTES_MAX = 25, 20
# Classes over a limit, as (methods, attributes). The numbers may only go down.
LARGE_CLASSES: dict[str, tuple[int, int]] = {
    "broker/access/users.py:Users": (29, 11),
    "broker/broker.py:Broker": (18, 34),
    "broker/groups/classic/group.py:ClassicGroup": (33, 16),
    "broker/groups/consumer/group.py:ConsumerGroup": (36, 18),
    "broker/groups/coordinator.py:Groups": (27, 11),
    "broker/groups/share/groups.py:ShareGroups": (40, 11),
    "broker/pressure/pressure.py:Pressure": (23, 30),
    "broker/queues/flush.py:FlushCoordinator": (28, 17),
    "broker/queues/limits.py:QueueLimits": (28, 13),
    "broker/queues/queue.py:Queue": (39, 21),
    "broker/queues/view.py:View": (26, 22),
    "broker/schemas/registry.py:Schemas": (28, 12),
    "broker/streams/streams.py:Streams": (30, 14),
    "broker/transactions/coordinator.py:Transactions": (39, 9),
    "broker/transactions/producers.py:Producers": (27, 7),
    "broker/vhosts/store.py:QueueStore": (35, 9),
    "broker/vhosts/vhost.py:VirtualHost": (31, 19),
    "embedded.py:Log": (31, 10),
    "listeners/amqp/connection.py:Connection": (34, 19),
    "listeners/http/server/bounded_protocol.py:BoundedHttp": (35, 21),
    "listeners/kafka/connection.py:Connection": (25, 23),
    "log/commit/scheduler.py:RoundScheduler": (26, 16),
    "log/disk/disk.py:RealDisk": (27, 1),
    "log/disk/file_cache.py:FileCache": (35, 11),
    "log/log.py:Log": (28, 15),
    "log/read/reader.py:Reader": (29, 11),
    "log/recovery/log_recovery.py:LogRecovery": (20, 26),
    "log/segments/segment.py:Segment": (12, 21),
    "log/shard.py:Shard": (38, 40),
    "log/standby/change_feed.py:StandbyFeed": (20, 21),
    "log/standby/follower.py:Standby": (29, 14),
}


def class_sizes() -> Iterator[tuple[str, int, int]]:
    for _, path in sources():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            attributes = {
                target.attr
                for method in methods
                for target in ast.walk(method)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
            yield f"{path.relative_to(SRC)}:{node.name}", len(methods), len(attributes)


def test_no_class_outgrows_the_limits() -> None:
    over = {
        name: (methods, attributes)
        for name, methods, attributes in class_sizes()
        if methods > METHODS_MAX or attributes > ATTRIBUTES_MAX
    }
    grown = {
        name: size
        for name, size in over.items()
        if name not in LARGE_CLASSES or size[0] > LARGE_CLASSES[name][0] or size[1] > LARGE_CLASSES[name][1]
    }
    assert not grown, f"split these classes, or give them collaborators: {grown}"
    shrunk = {name: over.get(name) for name, size in LARGE_CLASSES.items() if over.get(name) != size}
    assert not shrunk, f"write the smaller numbers into LARGE_CLASSES: {shrunk}"
