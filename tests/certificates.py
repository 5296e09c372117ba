"""Certificates for the tests of TLS, made by the openssl program: a CA, and what it signs."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"


class Pair(NamedTuple):
    """PEM files."""

    cert: str
    key: str


class Authority:
    def __init__(self, folder: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl program is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.cert = str(folder / f"{name}.pem")
        self._key = str(folder / f"{name}.key")
        extensions = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        openssl("req", "-x509", *NEW_KEY, "-keyout", self._key, "-out", self.cert, "-subj", f"/CN={name}", *extensions)

    def issue(self, name: str, *, days: int = 30, extension: str = NAMES) -> Pair:
        """For this machine, unless `extension` says something else. Less than no days: it has expired."""
        pair = Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.txt"
        extensions.write_text(extension)
        openssl("req", *NEW_KEY, "-keyout", pair.key, "-out", str(request), "-subj", f"/CN={name}")
        by = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", str(days))
        openssl("x509", "-req", "-in", str(request), *by, "-out", pair.cert, "-extfile", str(extensions))
        return pair


def openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
