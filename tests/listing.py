"""What is in a folder that a running broker changes meanwhile."""

import glob
from pathlib import Path


def listed(folder: Path, pattern: str) -> list[Path]:
    """Like `Path.glob`, which raises (up to Python 3.12) where a folder goes while it is being walked."""
    return [folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True, include_hidden=True)]
