"""Runs the `headrace` command for `python -m headrace`."""

from headrace.cli import main

main()
