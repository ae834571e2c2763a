"""The handshake: both sides prove that they hold the job's token before any message is decoded. No I/O.

The client speaks first, all parts have a fixed length, and the token itself never travels:

    client -> server    MAGIC, client nonce
    server -> client    MAGIC, server nonce
    client -> server    HMAC(token, "client", client nonce, server nonce)
    server -> client    "+", HMAC(token, "server", client nonce, server nonce)     or REFUSAL and the end

Both nonces are fresh, so a recorded handshake is worthless. The roles differ, so an answer cannot be sent back to its
sender. The client proves itself first, so a stranger gets nothing that depends on the token. The guarantees hold for
tokens that cannot be guessed (`secrets.token_bytes(32)`). The handshake does not encrypt what follows; TLS does.
"""

from __future__ import annotations

import hmac
import os

from resile.api.ids import Seconds

PRODUCT = b"resile/"
MAGIC = PRODUCT + b"1\n"
NONCE = 32
PROOF = 32
ACCEPTED = b"+"
REFUSAL = b"-wrong or missing job token\n"
"""All that a peer without the token can read after the server's nonce."""

HANDSHAKE_DEADLINE = Seconds(10.0)
"""Time for one handshake. It takes milliseconds, or seconds if 10,000 agents connect at once to a busy machine."""


class HandshakeRefused(ConnectionError):
    """The peer has another token, certificate or protocol. Trying again will not help; the text is one sentence."""


def _proof(token: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(token, MAGIC + role + client_nonce + server_nonce, "sha256")


def _check_magic(data: bytes, who: str) -> None:
    got = data[: len(MAGIC)]
    if MAGIC.startswith(got):
        return
    if got.startswith(PRODUCT):
        version = got[len(PRODUCT) :].split(b"\n")[0].decode("ascii", "replace")
        raise HandshakeRefused(f"{who} speaks version {version} of resile's protocol, not version 1")
    raise HandshakeRefused(f"{who} does not speak resile's protocol")


class _Handshake:
    __slots__ = ("_got", "_mine", "_theirs", "_token", "_who", "finished")

    def __init__(self, token: bytes, who: str) -> None:
        if not token:
            raise ValueError("the job token is empty")
        self._token = token
        self._who = who
        self._got = b""
        self._mine = os.urandom(NONCE)
        self._theirs = b""
        self.finished = False

    @property
    def rest(self) -> bytes:
        """Bytes that came after the end of the handshake and belong to frames."""
        return self._got

    @property
    def silent(self) -> bool:
        return not self._got and not self._theirs

    def _take(self, size: int) -> bytes:
        part, self._got = self._got[:size], self._got[size:]
        return part

    def _take_nonce(self) -> bool:
        _check_magic(self._got, self._who)
        if len(self._got) < len(MAGIC) + NONCE:
            return False
        self._take(len(MAGIC))
        self._theirs = self._take(NONCE)
        return True


class ServerHandshake(_Handshake):
    """The server's side of a handshake.

    The owner passes received bytes to `feed` and sends what `feed` returns, until `finished` is True.
    """

    __slots__ = ()

    def __init__(self, token: bytes, peer: str) -> None:
        super().__init__(token, f"the peer at {peer}")

    def feed(self, data: bytes) -> bytes:
        """Take received bytes, return bytes to send. If this raises HandshakeRefused, send REFUSAL and disconnect."""
        self._got += data
        answer = b""
        if not self._theirs:
            if not self._take_nonce():
                return b""
            answer = MAGIC + self._mine
        if len(self._got) < PROOF:
            return answer
        proof = self._take(PROOF)
        if not hmac.compare_digest(proof, _proof(self._token, b"client", self._theirs, self._mine)):
            raise HandshakeRefused(f"{self._who} has a wrong or missing job token")
        self.finished = True
        return answer + ACCEPTED + _proof(self._token, b"server", self._theirs, self._mine)


class ClientHandshake(_Handshake):
    """The client's side of a handshake. The owner sends `hello`, then calls `feed` as with `ServerHandshake`."""

    __slots__ = ()

    def __init__(self, token: bytes, server: str) -> None:
        super().__init__(token, f"the server at {server}")

    @property
    def hello(self) -> bytes:
        return MAGIC + self._mine

    def feed(self, data: bytes) -> bytes:
        """Take received bytes, return bytes to send. If this raises HandshakeRefused, disconnect."""
        self._got += data
        answer = b""
        if not self._theirs:
            if self._got[:1] in (b"\x15", b"\x16"):  # a TLS alert or handshake record
                raise HandshakeRefused(f"{self._who} speaks TLS, and no TLS is set up here")
            if self._may_be_refused() or not self._take_nonce():
                return b""
            answer = _proof(self._token, b"client", self._mine, self._theirs)
        if self._may_be_refused() or len(self._got) < len(ACCEPTED) + PROOF:
            return answer
        accepted, proof = self._take(len(ACCEPTED)), self._take(PROOF)
        expected = _proof(self._token, b"server", self._mine, self._theirs)
        if accepted != ACCEPTED or not hmac.compare_digest(proof, expected):
            raise HandshakeRefused(f"{self._who} does not hold this job's token")
        self.finished = True
        return answer

    def _may_be_refused(self) -> bool:
        """True if what came may be the beginning of REFUSAL. Raises HandshakeRefused once all of REFUSAL is there."""
        if self._got.startswith(REFUSAL):
            raise HandshakeRefused(f"{self._who} refused this peer: wrong or missing job token")
        return REFUSAL.startswith(self._got)
