"""`headrace log`: look into a data folder, without a broker."""

import click

from headrace.cli.lazy import AliasGroup


@click.group(cls=AliasGroup)
def log() -> None:
    """List, dump, verify and reindex the logs of a data folder."""
