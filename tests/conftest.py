"""How the suite is divided when several processes run it, and what every process it starts can rely on."""

import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

SPARK = ("tests/spark/", "tests/pipelines/")
# The longest files start first, so that no process runs one alone at the end while the others are idle.
LONGEST = (
    "spark",
    "tests/crash/test_states.py",
    "tests/record/test_fuzz.py",
    "tests/crash/test_faults.py",
    "tests/ui/test_dashboard.py",
    "tests/crash/test_rot.py",
    "tests/crash/test_kafka_kill.py",
    "tests/interop/kafka/test_spark_connector.py",
    "tests/interop/kafka/test_java.py",
    "tests/crash/test_queue_states.py",
    "tests/pressure/test_memory.py",
    "tests/crash/test_kill.py",
)

# A shell that starts a command in the background makes it ignore Ctrl-C, and so everything that command starts:
# the programs that the tests interrupt would never hear of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is: one that took 200 ms would fail its test.
# And the same code meets the same examples: `--hypothesis-profile curious` draws new ones.
settings.register_profile("curious", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("patient", settings.get_profile("curious"), derandomize=True)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws strings and numbers of the modules that are loaded, which are others whenever the files are
    divided otherwise: a run would meet what no run before it has met."""
    if config.getoption("--hypothesis-profile", default=None) is None:
        providers._get_local_constants = Constants


def group_of(nodeid: str) -> str:
    """By file, so that what a file shares is made once, and everything that uses Spark in one process."""
    path = nodeid.partition("::")[0]
    # One Spark session serves all tests that need one: a second JVM would cost more than it saves.
    return "spark" if path.startswith(SPARK) else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: a third of the time a test waits, for a disk, a JVM or a client's patience."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Not by xdist's own marks: with some versions of pytest it does not see them, and says nothing."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # by the number of tests: the longest ones have few
    return ByGroup(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one process alone takes them as they come
        rank = {group: number for number, group in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(group_of(item.nodeid), len(rank)))
