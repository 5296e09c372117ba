"""TLS to a broker: whom we trust, what we show, and what it means when the two sides do not agree."""

import re
import ssl
from pathlib import Path

from headrace.client.exchange import Endpoint, Trust
from headrace.errors import BrokerUnreachable, InvalidInput

FIRST_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)


def context_of(trust: Trust) -> ssl.SSLContext:
    """Without files: the machine's CAs, or those of SSL_CERT_FILE."""
    used = ""
    try:
        context = ssl.create_default_context(cafile=(used := trust.cacertfile) or None)
        if trust.pinnedcertfile:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            used = trust.pinnedcertfile
            # Only the first: behind it may be a CA's, and not everything of that CA is this broker.
            found = FIRST_CERTIFICATE.search(Path(used).read_text(encoding="ascii"))
            context.load_verify_locations(cadata=found[0] if found else "")
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate in the file is trusted by itself
        if trust.certfile:
            used = trust.certfile
            context.load_cert_chain(used, trust.keyfile or None)
    except (OSError, ValueError) as error:
        why = "is no PEM file for this" if isinstance(error, ssl.SSLError | ValueError) else error.strerror
        raise InvalidInput(f"{used}: {why}") from None
    return context


def refuse_if_final(endpoint: Endpoint, error: OSError) -> None:
    """BrokerUnreachable when trying again is of no use: one side does not take the other's certificate, so that
    nothing can have been stored, or there is no TLS at all."""
    if not isinstance(error, ssl.SSLError):
        return
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "" if endpoint.trust.cacertfile else "; ?cacertfile=FILE behind the address names its CA"
        raise BrokerUnreachable(
            f"{endpoint} shows a certificate we do not trust: {error.verify_message}{hint}"
        ) from None
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        hint = "" if endpoint.trust.certfile else "; ?certfile=FILE&keyfile=FILE behind the address names one"
        raise BrokerUnreachable(f"{endpoint} wants a certificate of its clients that it trusts{hint}") from None
    if reason in {"WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG"}:
        raise BrokerUnreachable(f"what answers at {endpoint} does not speak TLS: is it http:// there?") from None
