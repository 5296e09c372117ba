"""The `headrace` command. One file per noun, loaded when its command is run."""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    try:
        from headrace.cli import app
    except KeyboardInterrupt:  # somebody changed their mind at once: they need not see what was being imported
        sys.exit(130)
    app.main(arguments)
