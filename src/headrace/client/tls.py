"""TLS to a broker: the SSL context, and clear errors when a handshake fails for good."""

import re
import ssl
from pathlib import Path

from headrace.client.exchange import Endpoint, Trust
from headrace.errors import BrokerUnreachable, InvalidInput

FIRST_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)


def context_of(trust: Trust) -> ssl.SSLContext:
    """Without files, the system's CAs are trusted, or those of SSL_CERT_FILE."""
    used = ""
    try:
        context = ssl.create_default_context(cafile=(used := trust.cacertfile) or None)
        if trust.pinnedcertfile:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            used = trust.pinnedcertfile
            # Only the first certificate: a CA certificate after it would trust every server of that CA.
            found = FIRST_CERTIFICATE.search(Path(used).read_text(encoding="ascii"))
            context.load_verify_locations(cadata=found[0] if found else "")
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust a certificate of the file without its issuer
        if trust.certfile:
            used = trust.certfile
            context.load_cert_chain(used, trust.keyfile or None)
    except (OSError, ValueError) as error:
        why = "is not a suitable PEM file" if isinstance(error, ssl.SSLError | ValueError) else error.strerror
        raise InvalidInput(f"{used}: {why}") from None
    return context


def refuse_if_final(endpoint: Endpoint, error: OSError) -> None:
    """Raise BrokerUnreachable if a retry cannot help: one side rejects the other's certificate (so nothing was
    stored), or the server does not use TLS."""
    if not isinstance(error, ssl.SSLError):
        return
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "" if endpoint.trust.cacertfile else "; add ?cacertfile=FILE to the address to trust its CA"
        raise BrokerUnreachable(f"{endpoint} presents an untrusted certificate: {error.verify_message}{hint}") from None
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        hint = "" if endpoint.trust.certfile else "; add ?certfile=FILE&keyfile=FILE to the address"
        raise BrokerUnreachable(f"{endpoint} requires a client certificate that it trusts{hint}") from None
    if reason in {"WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG"}:
        raise BrokerUnreachable(f"the server at {endpoint} does not use TLS; try http://") from None
