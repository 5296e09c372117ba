"""The `headrace` command. One file per noun, loaded when its command is run."""

from headrace.cli.app import main

__all__ = ["main"]
