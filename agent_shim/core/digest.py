"""Digest strings: several digests of one blob, of which the strongest decides. Pure.

Grammar, choice and texts are those of bosh-utils (crypto/multiple_digest.go, crypto/digest.go): pieces joined by ``;``,
each ``algorithm:hex`` or a bare hex, which means sha1.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Final

import msgspec

from agent_shim.core.errors import DigestError

KNOWN: Final = ("sha512", "sha256", "sha1")
"""Supported algorithms, strongest first."""

# Go accepts every decimal digit of Unicode, as ``\d`` does.
_WORD: Final = re.compile(r"[a-zA-Z\d]+")


class Digest(msgspec.Struct, frozen=True):
    """One algorithm and its value, spelled as received."""

    algorithm: str
    value: str

    def __str__(self) -> str:
        return self.value if self.algorithm == "sha1" else f"{self.algorithm}:{self.value}"


class MultipleDigest(msgspec.Struct, frozen=True):
    """At least one digest, no two of the same algorithm, in the order received."""

    digests: tuple[Digest, ...]

    @classmethod
    def parse(cls, text: str) -> MultipleDigest:
        """Parse a digest string; raises ``DigestError`` with the text of the Go agent."""
        digests = []
        for piece in filter(None, text.split(";")):
            before, colon, after = piece.partition(":")
            algorithm, value = (before, after) if colon else ("sha1", before)
            if not (_WORD.fullmatch(algorithm) and _WORD.fullmatch(value)):
                raise DigestError(
                    "unable to parse digest string. Digest and algorithm key can only contain alpha-numeric characters"
                )
            digests.append(Digest(algorithm, value))
        parsed = cls(tuple(digests))
        if not digests:
            raise DigestError("no digest algorithm found. Supported algorithms: sha1, sha256, sha512")
        for name, count in Counter(digest.algorithm for digest in parsed.digests).items():
            if count > 1:
                raise DigestError(f"Multiple digests of the same algorithm '{name}' found in digests '{parsed}'")
        return parsed

    def __str__(self) -> str:
        return ";".join(map(str, self.digests))

    @property
    def strongest(self) -> Digest:
        """The digest that is compared; the first if no algorithm is known."""
        by_name = {digest.algorithm: digest for digest in self.digests}
        return next((by_name[name] for name in KNOWN if name in by_name), self.digests[0])

    def hasher(self) -> Hasher:
        """Return a hasher to feed before :meth:`check`."""
        return Hasher(self.strongest.algorithm)

    def check(self, hasher: Hasher) -> None:
        """Compare with the digest of ``hasher``, exactly; raises ``DigestError``."""
        expected, actual = self.strongest, hasher.digest().strongest
        if expected != actual:
            raise DigestError(f"Expected stream to have digest '{expected}' but was '{actual}'")

    def verify(self, data: bytes) -> None:
        """Raise ``DigestError`` unless ``data`` has the strongest of these digests."""
        hasher = self.hasher()
        hasher.update(data)
        self.check(hasher)


class Hasher:
    """Digests of one stream by several algorithms in one pass."""

    def __init__(self, *algorithms: str) -> None:
        for name in algorithms:
            if name not in KNOWN:
                raise DigestError(
                    f"Computing digest from stream: Unable to create digest of unknown algorithm '{name}'"
                )
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the stream; for many bytes other threads run meanwhile."""
        for each in self._hashes.values():
            each.update(data)

    def digest(self) -> MultipleDigest:
        """Return the digests of all bytes so far, in the order of the algorithms."""
        return MultipleDigest(tuple(Digest(name, each.hexdigest()) for name, each in self._hashes.items()))
