"""Certificates for the tests of TLS, made by the openssl program: a CA, and what it signs."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"
EXPIRED = ("-startdate", "20200101000000Z", "-enddate", "20200201000000Z")
CA_SETTINGS = """[ca]
default_ca = this
[this]
database = {folder}/index.txt
serial = {folder}/serial
new_certs_dir = {folder}
certificate = {cert}
private_key = {key}
default_md = sha256
policy = names
[names]
commonName = supplied
"""


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

    def issue(self, name: str, *, is_expired: bool = False, extension: str = NAMES) -> Pair:
        """For this machine, unless `extension` says something else."""
        pair = Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.txt"
        extensions.write_text(extension)
        openssl("req", *NEW_KEY, "-keyout", pair.key, "-out", str(request), "-subj", f"/CN={name}")
        files = ("-in", str(request), "-out", pair.cert, "-extfile", str(extensions))
        if is_expired:
            openssl("ca", "-batch", "-config", self._settings(), *files, *EXPIRED)
        else:
            openssl("x509", "-req", "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", "30", *files)
        return pair

    def _settings(self) -> str:
        """For `openssl ca`: of its programs only this one takes dates of the past in every version."""
        for name in ("index.txt", "serial"):
            (self._folder / name).write_text("" if name == "index.txt" else "1000")
        settings = self._folder / "ca.cnf"
        settings.write_text(CA_SETTINGS.format(folder=self._folder, cert=self.cert, key=self._key))
        return str(settings)


def openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
