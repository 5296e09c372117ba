"""`headrace log repair`: what is left of a data folder that no broker opens, and how to go on with that."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.data_folder.folder import Folder, data_dir_option
from headrace.cli.options import json_option

if TYPE_CHECKING:
    from headrace.log.catalog.repair import DocumentFacts, Done
    from headrace.log.recovery.journal_repair import JournalFacts

DAMAGED = 6
ENTRIES = ("checkpoint", "readable", "synced")
NOT_THERE = "what it describes is not there"
# By kind of document: what a broker is like that starts without it.
WITHOUT = {
    "streams": "the stream is not there. Its messages stay in logs/ and `headrace log dump` reads them, except what "
    "was confirmed since the last checkpoint and had not reached its segment",
    "queues": "the queue is not there until it is declared again; then it has its messages and acknowledgements, and "
    "its bindings count again after the start that follows",
    "exchanges": "the exchange is not there until it is declared again, and what is published to it is refused; its "
    "bindings count again after the start that follows",
    "vhosts": "a vhost with queues or exchanges is there all the same; an empty one has to be made again",
    "policies": "the policy does not apply: limits, expiry and dead lettering that it set are off",
    "operator-policies": "the operator's policy does not apply: its limits are off",
    "users": "the user cannot log in. If it was the only one, guest is made again, with its default password and from "
    "this machine only",
    "permissions": "the user may do nothing in that vhost",
    "topic_permissions": "the user is no longer held to routing keys at that exchange: set it again before others "
    "can connect",
}


@click.command("repair")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Go on with what is left. What cannot be read is set aside, and lost to the broker.",
)
@click.option(
    "--as-is",
    "as_is",
    multiple=True,
    metavar="FILE",
    help="Take this document of the catalog as it is now: it gets a new checksum. After a change by hand, too.",
)
@click.option(
    "--from-copy",
    "from_copy",
    multiple=True,
    metavar="FILE",
    help="Take this document from the catalog's copy, though the copy is damaged and may be out of date.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="FILE",
    help="Go on without this document of the catalog, damaged or not: it is set aside.",
)
@json_option
@data_dir_option
def repair(
    accept_loss: bool,
    as_is: tuple[str, ...],
    from_copy: tuple[str, ...],
    without: tuple[str, ...],
    as_json: bool,
    data_dir: str | None,
    config_file: Path | None,
) -> int:
    """Say what is left of a damaged catalog or journal, when the broker does not start because of it, and how to go on.

    Without an option nothing is changed. The broker must be stopped. Of the journal: entries up to `checkpoint` are in
    their logs for good, those up to `readable` can still be read, those up to `synced` had been confirmed. Of the
    catalog: each damaged document, what it says, what its copy says, and what is missing without it. The exit code is
    0 when everything is sound, will be restored by the next start or was repaired, and 6 when something is damaged.
    """
    from headrace.log.catalog import repair as repair_catalog
    from headrace.log.recovery import journal_repair as journal_repair

    with Folder(data_dir, config_file, quiet=True) as folder:
        done = repair_catalog.decide(
            folder.path, as_is=as_is, from_copy=from_copy, without=without, accept_loss=accept_loss
        )
        documents = repair_catalog.examine(folder.path)
        journal = journal_repair.accept_loss(folder.path) if accept_loss else journal_repair.examine(folder.path)
    hopeless = [facts for facts in documents if not facts.restores_itself]
    is_journal_lost = journal.problem is not None and not accept_loss
    if as_json:
        _show_json(journal, documents, done)
    else:
        _show(journal, documents, done)
    if hopeless:
        click.echo(
            "headrace: restore the folder from a backup if there is one; otherwise, for each document: `headrace log "
            "repair --as-is FILE` takes it as it is, `--from-copy FILE` what the copy says, `--without FILE` goes on "
            "without it; `--accept-loss` goes on without all that are left",
            err=True,
        )
    if is_journal_lost:
        click.echo(
            "headrace: restore the folder from a backup if there is one; `headrace log repair --accept-loss` gives up "
            "the entries that cannot be read, and the next start names every log that lacks confirmed messages",
            err=True,
        )
    return DAMAGED if hopeless or is_journal_lost else 0


def _show_json(journal: "JournalFacts", documents: "list[DocumentFacts]", done: "list[Done]") -> None:
    from dataclasses import asdict

    from headrace.cli.output import show_json

    described: list[dict[str, Any]] = [
        {
            **facts._asdict(),
            "says": _shown(facts.says),
            "copy": _shown(facts.copy),
            "without_it": WITHOUT.get(facts.kind, NOT_THERE),
        }
        for facts in documents
    ]
    show_json(
        {
            "sound": journal.problem is None and not documents,
            **asdict(journal),
            "documents": described,
            "done": [one._asdict() for one in done],
        }
    )


def _show(journal: "JournalFacts", documents: "list[DocumentFacts]", done: "list[Done]") -> None:
    from headrace.cli.output import show_facts

    entries = {name: getattr(journal, name) for name in ENTRIES}
    show_facts({"sound": journal.problem is None and not documents, **entries})
    for path in journal.set_aside:
        click.echo(f"set aside\t{path}")
    if journal.problem is not None:
        click.echo(f"problem\t{journal.problem}")
    for one in done:
        click.echo(f"done\t{one.path}: {one.what}")
    for facts in documents:
        click.echo(f"problem\t{facts.path}: {facts.problem}")
        for name, text in (("it says", facts.says), ("its copy", facts.copy)):
            click.echo(f"{name}\t{' '.join((_shown(text) or 'nothing').split())}")
        if facts.restores_itself:
            click.echo("next start\tputs the copy in its place")
        else:
            click.echo(f"without it\t{WITHOUT.get(facts.kind, NOT_THERE)}")
            click.echo(f"as it is\t{'can be taken' if facts.can_be_taken else 'cannot be taken: it cannot be read'}")


def _shown(text: str | None) -> str | None:
    """What people may paste into a report: without what a password could be guessed from."""
    return None if text is None else re.sub(r'("password_hash":\s*)"[^"]*"', r'\1"..."', text)
