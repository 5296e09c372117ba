"""The TLS certificate of the listeners: loaded at the start, and again when its files change.

To renew a certificate, replace the files: new connections get the new certificate, open connections are not affected.
Unusable files are an error at the start. Later they are logged, and the previous certificate stays in use.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence

from headrace.config import Config, InvalidSetting
from headrace.listeners.common.tls.alerts import AlertingContext

logger = logging.getLogger("headrace.tls")

CHECK_INTERVAL_S = 1.0  # delay after a change of the files until new connections get it
DEFAULTS = Config()

# OpenSSL's reasons, and texts that name what to check.
REASONS = {
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
    "PEM_LIB": "is not a PEM file with a certificate and its key",
    "NO_START_LINE": "is not a PEM file",
    "EE_KEY_TOO_SMALL": "the key is too short to be safe",
    "CA_MD_TOO_WEAK": "it is signed with an algorithm that is no longer safe",
}

Stamp = tuple[int, int, int] | None


class Tls:
    """Raises InvalidSetting for unusable settings, before any socket is opened."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stamps = self._failed_stamps = self._file_stamps()
        self._checked_at = 0.0
        self._use(*server_context(config))

    def context(self) -> ssl.SSLContext:
        """The context for the next connection."""
        self._reload_if_due()
        return self._context

    def expires_s(self) -> float:
        """The expiry of the certificate, in seconds since 1970."""
        self._reload_if_due()
        return self._expires_s

    def _reload_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            self._reload()

    def _use(self, context: ssl.SSLContext, expires: str) -> None:
        self._context = context
        self._expires_s = ssl.cert_time_to_seconds(expires)
        logger.info("the certificate in %s is valid until %s", self._config.tls_cert, expires)

    def _reload(self) -> None:
        stamps = self._file_stamps()
        if stamps in (self._stamps, self._failed_stamps):
            return
        try:
            made = server_context(self._config)
        except InvalidSetting as error:
            # Perhaps only one of the files is replaced yet: the next change is tried again.
            self._failed_stamps = stamps
            logger.error("the changed certificate cannot be used, so the previous one stays in use: %s", error)
        else:
            self._stamps = self._failed_stamps = stamps
            self._use(*made)

    def _file_stamps(self) -> Sequence[Stamp]:
        config = self._config
        return [_stamp(path) for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path is not None]


def tls_of(config: Config) -> Tls | None:
    """None if no certificate is set. Raises InvalidSetting if another setting needs one."""
    if config.tls_cert is not None:
        return Tls(config)
    for name, value, usual in (
        ("tls_key", config.tls_key, DEFAULTS.tls_key),
        ("tls_client_ca", config.tls_client_ca, DEFAULTS.tls_client_ca),
        ("tls_listeners", config.tls_listeners, DEFAULTS.tls_listeners),
    ):
        if value != usual:
            raise _invalid(config, name, "without tls_cert no listener uses TLS")
    return None


def server_context(config: Config) -> tuple[ssl.SSLContext, str]:
    """The context for TLS 1.2 or newer and the expiry of its certificate. Raises InvalidSetting with the problem of the
    files."""
    assert config.tls_cert is not None
    context = AlertingContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    for name, path in (("tls_cert", config.tls_cert), ("tls_key", config.tls_key)):
        if path is not None and not os.access(path, os.R_OK):  # OpenSSL does not report which of the two files it means
            raise _invalid(config, name, f"{path} {_why_unreadable(path)}")
    key = config.tls_key or config.tls_cert
    try:
        context.load_cert_chain(config.tls_cert, key, password=lambda: _refuse_password(config, key))
    except (OSError, ValueError) as error:
        raise _invalid(config, "tls_cert", f"{config.tls_cert} with the key in {key}: {_reason(error)}") from None
    expires = _test_handshake(context, config)
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except OSError as error:
            raise _invalid(config, "tls_client_ca", f"{config.tls_client_ca}: {_reason(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context, expires


def _test_handshake(server: ssl.SSLContext, config: Config) -> str:
    """Runs a handshake in memory with a client that trusts this certificate. It finds the problems that every client
    would have: an expired certificate, one that is not valid yet, or one for another purpose. Returns the expiry."""
    assert config.tls_cert is not None
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # only real clients know the host name
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(config.tls_cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side_object = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (client_side, server_side_object, client_side):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            raise _invalid(config, "tls_cert", f"{config.tls_cert}: {_reason(error)}") from None
    seen = client_side.getpeercert()
    assert seen is not None
    return str(seen["notAfter"])


def _refuse_password(config: Config, key: str) -> str:
    raise _invalid(config, "tls_key", f"{key} is encrypted with a password; remove it with `openssl pkey`")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError) and error.reason:
        return REASONS.get(error.reason, error.reason.replace("_", " ").lower())
    if isinstance(error, ssl.SSLError):
        return "is not a PEM file"
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


def _why_unreadable(path: str) -> str:
    return "is not readable by this user" if os.path.exists(path) else "does not exist"


def _invalid(config: Config, name: str, reason: str) -> InvalidSetting:
    return InvalidSetting(name, config.origins.get(name, "default"), reason)


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)  # follows links: mounted secrets are replaced by changing a link
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
