"""Docs that fail the build: what the code has is written down, and what is written down leads somewhere."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from headrace import Client, __all__
from headrace.cli.app import root
from headrace.config import SETTINGS
from headrace.spark.options import read_options
from tests.cli.running import serving

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

sys.path.insert(0, str(ROOT / "tools"))
import reference  # noqa: E402

import record  # noqa: E402


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, click.Context(inner, parent=context, info_name=name))


def test_the_reference_tables_match_the_code() -> None:
    assert reference.stale() == [], "run `make docs`"


def test_every_command_and_option_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    settings = {setting.name for setting in SETTINGS}
    for command, context in commands(root, click.Context(root, info_name="headrace")):
        path = context.command_path
        section = page if command is root else page.partition(f"### {path}\n")[2].partition("\n### ")[0]
        assert section, f"{path} is not in docs/cli.md"
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name not in settings:
                for name in parameter.opts:
                    assert re.search(rf"(?<![\w-]){name}(?![\w-])", section), f"{path} {name} is not in docs/cli.md"
        assert command.help, f"{path} has no help"


def test_every_option_has_a_sentence_of_help() -> None:
    for command, context in commands(root, click.Context(root, info_name="headrace")):
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{context.command_path} {parameter.opts} has no help"


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    for setting in SETTINGS:
        assert f"| `{setting.name}`" in page, setting.name
        assert setting.help.rstrip().endswith("."), f"{setting.name}: its help is not a sentence"


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    for name in __all__:
        if not name.startswith("_"):
            assert re.search(rf"\b{name}\b", page, re.I), f"headrace.{name} is not in docs/python.md"


@pytest.fixture(scope="module")
def interface(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(tmp_path_factory.mktemp("data")) as broker, Client(broker.url) as client:
        client.create_topic("something")
        yield client


def test_every_http_route_is_documented(interface: Client) -> None:
    missing = [
        f"{method.upper()} {path}"
        for path, methods in interface.get("/openapi.json")["paths"].items()
        for method in methods
        if method in {"get", "post", "put", "patch", "delete"} and not _documented(method.upper(), path)
    ]
    assert not missing, f"not in docs/: {missing}"


def _documented(method: str, path: str) -> bool:
    """`METHOD /path`, with the parameters named as the interface names them; a query may follow."""
    return re.search(rf"{method}[ |`]+{re.escape(path)}(?![\w/{{])", TEXT) is not None


@pytest.mark.parametrize("path", ["/metrics", "/metrics/detailed"])
def test_every_metric_is_documented(interface: Client, path: str) -> None:
    text = interface.request("GET", path).body.decode()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    assert names
    missing = sorted(name for name in names if name not in TEXT and not name.startswith(("process_", "python_")))
    assert not missing, f"not in docs/: {missing}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in _anchors(file), f"{page.name} links to {target}, which has no such heading"


def test_every_page_can_be_found_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [page.name for page in PAGES if page.name != "index.md" and f"({page.name}" not in index]
    assert not missing, f"docs/index.md does not name {missing}"


def test_the_readme_begins_with_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    block = readme.partition("```\n")[2].partition("```")[0]
    assert [line.split("  ")[0] for line in block.splitlines()] == ["make run", "make test"]


def test_the_site_has_every_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if f"- {page.name}\n" not in site] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "pipelines.md"], ids=lambda p: p.name)
def test_the_options_of_a_spark_example_go_together(page: Path) -> None:
    shown = re.findall(r'read(?:Stream)?\.format\("headrace"\)(.*?)\.load\(\)', page.read_text(), re.S)
    assert shown
    for options in shown:
        read_options(dict(re.findall(r'\.option\("(\w+)", "([^"]*)"\)', options)))


def test_the_json_of_the_docs_is_json() -> None:
    for page in PAGES:
        for block in re.findall(r"```json\n(.*?)```", page.read_text(), re.S):
            msgspec.json.decode(block)


def test_the_first_run_is_shown_as_it_was_recorded() -> None:
    """At most twelve lines up to `ready`, and page and drawing are those of the recording."""
    docs = ROOT / "docs"
    events = [(at, text) for at, _, text in map(json.loads, (docs / "first-run.cast").read_text().splitlines()[1:])]
    lines = [line for _, line in record.lines_of(events)]
    greeting = lines[1 : lines.index("ready") + 1]
    assert lines[0] == "$ headrace serve --demo" and len(greeting) <= 12
    labels = [line.split()[0] for line in greeting]
    assert labels == [
        "headrace",
        "new",
        "amqp",
        "kafka",
        "http",
        "access",
        "dashboard",
        "publish",
        "read",
        "demo",
        "ready",
    ]
    assert lines[-1] == "stopped; everything is on disk"
    assert "\n".join(["```", *greeting, "```"]) in (docs / "first-run.md").read_text()
    assert (docs / "images" / "first-run.svg").read_text() == record.svg(events), "python tools/record.py --again"
