"""The certificate that the listeners show: read at the start, and again when its files change.

A person who renews a certificate replaces the files, and need do nothing else: whoever connects afterwards sees the
new one. Connections that are open stay as they are. Files that cannot be used are a clear error at the start, and
later a line in the log while the certificate in use stays.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence

from headrace.config import Config, InvalidSetting
from headrace.listeners.common.tls.alerts import TalkingContext

logger = logging.getLogger("headrace.tls")

LOOK_INTERVAL_S = 1.0  # how soon after a change of the files new connections see it
DEFAULTS = Config()

# What OpenSSL calls it, and what a person should look at.
REASONS = {
    "KEY_VALUES_MISMATCH": "the key is not the certificate's",
    "PEM_LIB": "is not a PEM file with a certificate and its key",
    "NO_START_LINE": "is not a PEM file",
    "EE_KEY_TOO_SMALL": "the key is too short to be safe",
    "CA_MD_TOO_WEAK": "it is signed with an algorithm that is not safe any more",
}

Stamp = tuple[int, int, int] | None


class Tls:
    """Settings that cannot be used are InvalidSetting here, before anything is opened."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stamps = self._failed_stamps = self._look()
        self._looked_at = 0.0
        self._use(*server_context(config))

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        self._keep_up()
        return self._context

    def expires_s(self) -> float:
        """In seconds since 1970."""
        self._keep_up()
        return self._expires_s

    def _keep_up(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= LOOK_INTERVAL_S:
            self._looked_at = now
            self._renew()

    def _use(self, context: ssl.SSLContext, expires: str) -> None:
        self._context = context
        self._expires_s = ssl.cert_time_to_seconds(expires)
        logger.info("the certificate in %s is good until %s", self._config.tls_cert, expires)

    def _renew(self) -> None:
        stamps = self._look()
        if stamps in (self._stamps, self._failed_stamps):
            return
        try:
            made = server_context(self._config)
        except InvalidSetting as error:
            # Perhaps only one of the files is here yet: the next change is looked at again.
            self._failed_stamps = stamps
            logger.error("the certificate has changed and cannot be used, so the one before stays: %s", error)
        else:
            self._stamps = self._failed_stamps = stamps
            self._use(*made)

    def _look(self) -> Sequence[Stamp]:
        config = self._config
        return [_stamp(path) for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path is not None]


def tls_of(config: Config) -> Tls | None:
    """None when no certificate is set, and nothing that would need one."""
    if config.tls_cert is not None:
        return Tls(config)
    for name, value, usual in (
        ("tls_key", config.tls_key, DEFAULTS.tls_key),
        ("tls_client_ca", config.tls_client_ca, DEFAULTS.tls_client_ca),
        ("tls_listeners", config.tls_listeners, DEFAULTS.tls_listeners),
    ):
        if value != usual:
            raise _invalid(config, name, "without tls_cert no listener speaks TLS")
    return None


def server_context(config: Config) -> tuple[ssl.SSLContext, str]:
    """TLS 1.2 or newer, with the certificate of the settings, and until when that is good. InvalidSetting says what is
    wrong with the files."""
    assert config.tls_cert is not None
    context = TalkingContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    for name, path in (("tls_cert", config.tls_cert), ("tls_key", config.tls_key)):
        if path is not None and not os.access(path, os.R_OK):  # OpenSSL does not say which of the two it means
            raise _invalid(config, name, f"{path} {_why_unreadable(path)}")
    key = config.tls_key or config.tls_cert
    try:
        context.load_cert_chain(config.tls_cert, key, password=lambda: _refuse_password(config, key))
    except (OSError, ValueError) as error:
        raise _invalid(config, "tls_cert", f"{config.tls_cert} with the key in {key}: {_reason(error)}") from None
    expires = _try_as_a_client_would(context, config)
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except OSError as error:
            raise _invalid(config, "tls_client_ca", f"{config.tls_client_ca}: {_reason(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context, expires


def _try_as_a_client_would(server: ssl.SSLContext, config: Config) -> str:
    """One handshake in memory, by a client that trusts this very certificate: it finds what every client would find,
    such as one that has expired, is not valid yet, or was made for something else. Returns until when it is good."""
    assert config.tls_cert is not None
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # whoever connects knows the name, we do not
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(config.tls_cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (asking, answering, asking):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            raise _invalid(config, "tls_cert", f"{config.tls_cert}: {_reason(error)}") from None
    seen = asking.getpeercert()
    assert seen is not None
    return str(seen["notAfter"])


def _refuse_password(config: Config, key: str) -> str:
    raise _invalid(config, "tls_key", f"{key} is locked with a password; `openssl pkey` writes it without")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError) and error.reason:
        return REASONS.get(error.reason, error.reason.replace("_", " ").lower())
    if isinstance(error, ssl.SSLError):
        return "is not a PEM file"
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


def _why_unreadable(path: str) -> str:
    return "may not be read by this user" if os.path.exists(path) else "does not exist"


def _invalid(config: Config, name: str, reason: str) -> InvalidSetting:
    return InvalidSetting(name, config.origins.get(name, "default"), reason)


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)  # through links: whoever mounts secrets swaps those
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
