"""Protected mode with real clients: while guest is the only user, only clients on the broker's machine are served."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

UNSHARE = ("unshare", "--map-root-user", "--net")


def outcomes(folder: Path, *options: str) -> dict[str, str]:
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not allow network namespaces (unshare --net, from util-linux)")
    command = [*UNSHARE, sys.executable, "-m", "tests.interop.remote_client", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_broker_on_the_network_with_only_guest_serves_no_remote_client(tmp_path: Path) -> None:
    found = outcomes(tmp_path)
    assert found["amqp"] in ("ProbableAuthenticationError", "AuthenticationError")
    assert found["kafka"] == "refused"
    assert found["http"].startswith("403 ") and "--no-protected-mode" in found["http"], "the response says what to do"
    assert found["management"].startswith("401 ")
    assert found["health"] == "200", "probes of an orchestrator come from another address"
    local = {name: found[f"local {name}"] for name in ("amqp", "kafka", "http", "management", "health")}
    assert local == {"amqp": "served", "kafka": "served", "http": "200", "management": "200", "health": "200"}
    assert "only programs on this machine are served until you create a user (protected mode)" in found["said"]


def test_protected_mode_off_serves_remote_clients_and_the_start_says_so(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "--no-protected-mode")
    remote = {name: found[name] for name in ("amqp", "kafka", "http", "management", "health")}
    assert remote == {"amqp": "served", "kafka": "served", "http": "200", "management": "200", "health": "200"}
    assert "every machine that can reach amqp, kafka and http has full access without a login" in found["said"]
