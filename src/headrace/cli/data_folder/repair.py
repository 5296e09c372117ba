"""`headrace log repair`: examine and repair a data folder that a broker cannot open."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.data_folder.folder import Folder, data_dir_option
from headrace.cli.options import json_option

if TYPE_CHECKING:
    from headrace.log.catalog.repair import CatalogRepair, DocumentFacts
    from headrace.log.recovery.journal_repair import JournalFacts

DAMAGED = 6
ENTRIES = ("checkpoint", "readable", "synced")
OBJECT_MISSING = "the object it describes is missing"
# Effect of starting the broker without a document, by kind of document.
WITHOUT = {
    "streams": "the stream is missing. Its messages stay in logs/ and can be read with `headrace log dump`, except "
    "those confirmed since the last checkpoint that had not reached their segment",
    "queues": "the queue is missing until it is declared again. It then has its messages and acknowledgements, and its "
    "bindings apply again after the next start",
    "exchanges": "the exchange is missing until it is declared again, and publishing to it is refused. Its bindings "
    "apply again after the next start",
    "vhosts": "a vhost with queues or exchanges still exists; an empty one must be created again",
    "policies": "the policy does not apply: the limits, expiry and dead lettering that it set are off",
    "operator-policies": "the operator policy does not apply: its limits are off",
    "global-parameters": "the global parameter is missing; without cluster_name the cluster has its default name",
    "users": "the user cannot log in. If it was the only one, guest is created again with its default password, and "
    "can log in from this machine only",
    "permissions": "the user has no permissions in that vhost",
    "topic_permissions": "the user may use any routing key with that exchange: set the permission again before clients "
    "can connect",
}


@click.command("repair")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Continue with what is left: move unreadable journal entries and documents aside and start without them.",
)
@click.option(
    "--as-is",
    "as_is",
    multiple=True,
    metavar="FILE",
    help="Accept this catalog document in its present form and give it a new checksum, also after a change by hand.",
)
@click.option(
    "--from-copy",
    "from_copy",
    multiple=True,
    metavar="FILE",
    help="Restore this document from the copy of the catalog, although the copy is damaged and may be outdated.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="FILE",
    help="Move this catalog document aside, damaged or not, and continue without it.",
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
    """Examine or repair a damaged catalog or journal that keeps the broker from starting.

    Without options, nothing is changed. The broker must be stopped.

    For the journal it prints three entry numbers: entries up to `checkpoint` are in their logs, those up to `readable`
    can still be read, and those up to `synced` were confirmed. For the catalog it prints each damaged document, its
    contents, its copy, and the effect of starting without it.

    Exits with 0 if everything is sound, was repaired, or will be restored by the next start, and with 6 if something is
    damaged.
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
            "headrace: restore the data folder from a backup if you have one. Otherwise decide for each document with "
            "`headrace log repair`: --as-is FILE accepts it, --from-copy FILE restores it from the copy, --without "
            "FILE continues without it; --accept-loss continues without all the others",
            err=True,
        )
    if is_journal_lost:
        click.echo(
            "headrace: restore the data folder from a backup if you have one. Otherwise `headrace log repair "
            "--accept-loss` discards the unreadable entries, and the next start names every log that "
            "lost confirmed messages",
            err=True,
        )
    return DAMAGED if hopeless or is_journal_lost else 0


def _show_json(journal: "JournalFacts", documents: "list[DocumentFacts]", done: "list[CatalogRepair]") -> None:
    from dataclasses import asdict

    from headrace.cli.output import show_json

    described: list[dict[str, Any]] = [
        {
            **facts._asdict(),
            "says": _shown(facts.says),
            "copy": _shown(facts.copy),
            "without_it": WITHOUT.get(facts.kind, OBJECT_MISSING),
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


def _show(journal: "JournalFacts", documents: "list[DocumentFacts]", done: "list[CatalogRepair]") -> None:
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
            click.echo("next start\trestores it from the copy")
        else:
            click.echo(f"without it\t{WITHOUT.get(facts.kind, OBJECT_MISSING)}")
            click.echo(
                f"as it is\t{'can be accepted' if facts.can_be_taken else 'cannot be accepted: it is unreadable'}"
            )


def _shown(text: str | None) -> str | None:
    """The text without password hashes, so that users can paste it into a bug report."""
    return None if text is None else re.sub(r'("password_hash":\s*)"[^"]*"', r'\1"..."', text)
