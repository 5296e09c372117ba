"""SASL/SCRAM (RFC 5802, in Kafka's variant): the password itself is never sent."""

import base64
import binascii
import re
import secrets

from headrace.broker.access import scram_keys
from headrace.broker.access.users import User, Users
from headrace.listeners.kafka.auth.mechanism import LoginRefused, wrong

NONCE_BYTES = 18
_NAME = rb"(?:[^=,\0]|=2C|=3D)+"
_FIRST = re.compile(
    rb"(?P<header>n,(?:a=(?P<acts_as>" + _NAME + rb"))?,)"
    rb"(?P<bare>n=(?P<name>" + _NAME + rb"),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)(?P<extensions>(?:,[A-Za-z]+=[^,\0]*)*))"
)
_FINAL = re.compile(
    rb"(?P<bare>c=(?P<header>[A-Za-z0-9+/=]+),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)(?:,[A-Za-z]+=[^,\0]*)*)"
    rb",p=(?P<proof>[A-Za-z0-9+/=]+)"
)
_DECOY = secrets.token_bytes(32)  # for the salts of unknown users, which must not change between logins


class Scram:
    """One login: two client tokens, and an answer to each."""

    def __init__(self, users: Users, mechanism: str) -> None:
        self._users = users
        self.mechanism = mechanism
        self.user: User | None = None
        self._name = ""
        self._keys: scram_keys.ScramKeys | None = None
        self._header = self._nonce = self._messages = b""

    def take(self, token: bytes) -> bytes:
        return self._finish(token) if self._nonce else self._begin(token)

    def _begin(self, token: bytes) -> bytes:
        found = _FIRST.fullmatch(token)
        if found is None:
            raise self._refused("the first message is not a valid SCRAM message")
        name = _unescaped(found["name"])
        if found["acts_as"] is not None and _unescaped(found["acts_as"]) != name:
            text = "Authentication failed: Client requested an authorization id that is different from username"
            raise LoginRefused(text, text)
        if b",tokenauth=true" in found["extensions"].lower():
            raise self._refused("delegation tokens are not supported")
        self._name, self._header = name.decode("utf-8", "replace"), found["header"]
        self._keys = self._users.scram_keys(self._name, self.mechanism)
        salt, iterations = self._salt_of(name), scram_keys.ITERATIONS_MIN
        if self._keys is not None:
            salt, iterations = self._keys.salt, self._keys.iterations
        self._nonce = found["nonce"] + secrets.token_urlsafe(NONCE_BYTES).encode()
        answer = b"r=%b,s=%b,i=%d" % (self._nonce, base64.b64encode(salt), iterations)
        self._messages = found["bare"] + b"," + answer
        return answer

    def _finish(self, token: bytes) -> bytes:
        found = _FINAL.fullmatch(token)
        if found is None:
            raise self._refused("the final message is not a valid SCRAM message")
        try:
            header, proof = (base64.b64decode(found[part], validate=True) for part in ("header", "proof"))
        except binascii.Error:
            raise self._refused("the final message is not valid base64") from None
        if found["nonce"] != self._nonce or header != self._header:
            raise self._refused("the final message belongs to another login")
        messages = self._messages + b"," + found["bare"]
        # Checked last, so that an unknown user takes the same steps and the same time.
        keys = self._keys or scram_keys.of_salted(self.mechanism, _DECOY, b"", 0)
        proven = scram_keys.proves(self.mechanism, keys, messages, proof)
        if not proven or self._keys is None or not self._is_current():
            raise wrong(self.mechanism, f"user {self._name!r:.100} - invalid credentials")
        self.user = self._users.user(self._name)
        return b"v=" + base64.b64encode(scram_keys.digest(self.mechanism, keys.server_key, messages))

    def _is_current(self) -> bool:
        """Whether the password is the same as when the login began."""
        return self._users.scram_keys(self._name, self.mechanism) == self._keys

    def _salt_of(self, name: bytes) -> bytes:
        return scram_keys.digest(self.mechanism, _DECOY, name)[: scram_keys.SALT_BYTES]

    def _refused(self, why: str) -> LoginRefused:
        return wrong(self.mechanism, why)


def _unescaped(name: bytes) -> bytes:
    return name.replace(b"=2C", b",").replace(b"=3D", b"=")
