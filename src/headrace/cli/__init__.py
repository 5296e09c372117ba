"""The `headrace` command.

Each command group has a module, which is imported only when the command runs, so that `headrace --help` stays fast.
Commands talk to a broker through headrace.client; only those in data_folder/ read the files of a data folder.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    try:
        from headrace.cli import app
    except KeyboardInterrupt:  # Ctrl-C during the imports: exit without a traceback
        sys.exit(130)
    app.main(arguments)
