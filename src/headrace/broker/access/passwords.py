"""Password hashes in RabbitMQ's format, so that users can be exported and imported with their passwords."""

import base64
import binascii
import hashlib
import hmac
import secrets

from headrace.errors import InvalidInput

SHA256 = "rabbit_password_hashing_sha256"
SHA512 = "rabbit_password_hashing_sha512"
ALGORITHMS = {SHA256: hashlib.sha256, SHA512: hashlib.sha512}
SALT_BYTES = 4  # short, but part of RabbitMQ's format
UNKNOWN_USER = base64.b64encode(
    bytes(SALT_BYTES + hashlib.sha256().digest_size)
).decode()  # compared with for unknown users


def hash_password(password: str) -> str:
    salt = secrets.token_bytes(SALT_BYTES)
    return base64.b64encode(salt + _digest(SHA256, salt, password)).decode("ascii")


def fits(password: str, stored: str, algorithm: str) -> bool:
    """Takes the same time for every stored hash, so that the time reveals nothing."""
    data = base64.b64decode(stored)
    salt, wanted = data[:SALT_BYTES], data[SALT_BYTES:]
    return hmac.compare_digest(_digest(algorithm, salt, password), wanted)


def check_hash(stored: str, algorithm: str) -> None:
    """Raises InvalidInput unless this is a hash of the algorithm. An empty hash is valid: it disables the login."""
    kind = ALGORITHMS.get(algorithm)
    if kind is None:
        raise InvalidInput(f"passwords are hashed with {' or '.join(ALGORITHMS)}, not with {algorithm[:80]!r}")
    try:
        data = base64.b64decode(stored, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("a password hash must be base64") from None
    if data and len(data) != SALT_BYTES + kind().digest_size:
        raise InvalidInput(f"a hash of {algorithm} has {SALT_BYTES + kind().digest_size} bytes, not {len(data)}")


def as_bytes(password: str) -> bytes:
    try:
        return password.encode("utf-8", "surrogateescape")  # bytes that are not UTF-8 arrive as surrogate escapes
    except UnicodeEncodeError:
        return password.encode("utf-8", "surrogatepass")


def _digest(algorithm: str, salt: bytes, password: str) -> bytes:
    return ALGORITHMS[algorithm](salt + as_bytes(password)).digest()
