"""Keys of SCRAM (RFC 5802), which verify a password without revealing it.

They are derived when a password is set, as they cannot be derived from a hash in RabbitMQ's format.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.broker.access.passwords import as_bytes
from headrace.errors import InvalidInput

SHA256, SHA512 = "SCRAM-SHA-256", "SCRAM-SHA-512"
HASHES = {SHA256: "sha256", SHA512: "sha512"}
ITERATIONS_MIN, ITERATIONS_MAX = 4096, 16384  # as in Kafka
SALT_BYTES = 24
SALT_BYTES_MAX = 1024


class ScramKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes


Credentials = dict[str, ScramKeys]  # by mechanism


def of_password(password: str) -> Credentials:
    """Keys of every mechanism. Takes some milliseconds, by design."""
    found = {}
    for mechanism, hash_name in HASHES.items():
        salt = secrets.token_bytes(SALT_BYTES)
        salted = hashlib.pbkdf2_hmac(hash_name, as_bytes(password), salt, ITERATIONS_MIN)
        found[mechanism] = of_salted(mechanism, salted, salt, ITERATIONS_MIN)
    return found


def of_salted(mechanism: str, salted_password: bytes, salt: bytes, iterations: int) -> ScramKeys:
    client_key = digest(mechanism, salted_password, b"Client Key")
    return ScramKeys(
        salt=salt,
        iterations=iterations,
        stored_key=hashlib.new(HASHES[mechanism], client_key).digest(),
        server_key=digest(mechanism, salted_password, b"Server Key"),
    )


def proves(mechanism: str, keys: ScramKeys, said: bytes, proof: bytes) -> bool:
    """Whether the proof, a signature of the exchanged messages, shows that the client knows the password."""
    signature = digest(mechanism, keys.stored_key, said)
    if len(proof) != len(signature):
        return False
    client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
    return hmac.compare_digest(hashlib.new(HASHES[mechanism], client_key).digest(), keys.stored_key)


def digest(mechanism: str, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, HASHES[mechanism])


def checked(found: Any) -> Credentials:
    """Credentials from a document; raises InvalidInput."""
    try:
        credentials = msgspec.convert(found, Credentials)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"invalid SCRAM credentials: {error}") from None
    check(credentials)
    return credentials


def check(credentials: Mapping[str, ScramKeys]) -> None:
    for mechanism, keys in credentials.items():
        if mechanism not in HASHES:
            raise InvalidInput(f"unknown SCRAM mechanism {mechanism!r:.40}")
        size = hashlib.new(HASHES[mechanism]).digest_size
        if len(keys.stored_key) != size or len(keys.server_key) != size:
            raise InvalidInput(f"a key of {mechanism} has {size} bytes")
        if not 0 < len(keys.salt) <= SALT_BYTES_MAX:
            raise InvalidInput(f"a salt of SCRAM has 1 to {SALT_BYTES_MAX:,} bytes")
        if not ITERATIONS_MIN <= keys.iterations <= ITERATIONS_MAX:
            raise InvalidInput(f"SCRAM takes {ITERATIONS_MIN:,} to {ITERATIONS_MAX:,} iterations")
