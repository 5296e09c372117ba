"""All doors and a pipeline for an hour: how often messages were taken, and what grew.

    python -m bench.soak                      # an hour
    python -m bench.soak --minutes 5 --no-spark

Starts a broker with the demo shop, publishes once a second beside it and asks for the broker's numbers. Prints a line
a minute, then the share of publishes that were confirmed within a second, and memory, files and disk at the beginning
and at the end. Nothing here is a test: read it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

CONFIRM_S_MAX = 1.0
SETTLE_S = 60.0  # before growth is judged: caches fill, Spark starts


def state(pid: int, client: httpx.Client) -> dict[str, Any]:
    now = client.get("/api/headrace/overview?step=60").json()
    return {
        "memory_mb": round(now["memory_bytes"] / 1e6, 1),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "log_mb": round(now["log_size_bytes"] / 1e6, 1),
        "published_per_s": now["rates"]["published"],
        "ready": now["ready"],
        "sync_p99_ms": now["sync_ms"]["p99"],
        "stalls": now["stalls"],
        "pipelines": [f"{p['name']} {p['state']}" for p in client.get("/pipelines").json()["pipelines"]],
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--no-spark", action="store_true")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headrace", "serve", "--demo", "--data-dir", str(Path(folder, "data"))]
        command += ["--http", "localhost:0", "--amqp", "localhost:0", "--kafka", "localhost:0"]
        environment = {**os.environ, **({"JAVA_HOME": "/nowhere"} if given.no_spark else {})}
        broker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            watch(broker, given.minutes * 60)
        finally:
            broker.terminate()
            broker.wait(60)


def watch(broker: "subprocess.Popen[str]", seconds: float) -> None:
    assert broker.stdout is not None
    said = ""
    for line in broker.stdout:
        said += line
        if line.startswith("ready"):
            break
    found = re.search(r"^http\s+(\S+)", said, re.M)
    assert found is not None, said
    asked = taken = 0
    worst = 0.0
    first: dict[str, Any] | None = None
    with httpx.Client(base_url=found[1], timeout=10) as client:
        began = time.monotonic()
        minute = 0
        while time.monotonic() - began < seconds:
            at = time.monotonic()
            asked += 1
            try:
                answer = client.post("/topics/soak/messages", content=b"x", headers={"content-type": "text/plain"})
                took = time.monotonic() - at
                worst = max(worst, took)
                taken += answer.status_code == 200 and took <= CONFIRM_S_MAX
            except httpx.HTTPError as error:
                print(f"not taken: {error!r}", flush=True)
            if first is None and at - began > min(SETTLE_S, seconds / 2):
                first = state(broker.pid, client)
            if (at - began) // 60 > minute:
                minute = int((at - began) // 60)
                print(minute, state(broker.pid, client), flush=True)
            time.sleep(max(0.0, 1.0 - (time.monotonic() - at)))
        last = state(broker.pid, client)
    print(f"availability {taken / asked:.4%}: of {asked:,} publishes, confirmed within {CONFIRM_S_MAX:g} s")
    print(f"worst confirm {worst:.3f} s")
    for name in ("memory_mb", "files", "threads", "log_mb", "stalls"):
        print(f"{name:10} {(first or last)[name]:>10} -> {last[name]:>10}")


if __name__ == "__main__":
    main()
