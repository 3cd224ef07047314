"""Parses digest strings, which contain one or more digests of a blob, and checks data against the strongest of them.
This module performs no I/O.

The grammar, the order of strength and the error messages match bosh-utils (crypto/multiple_digest.go,
crypto/digest.go). The digests are separated by ``;``, and each is ``algorithm:hex``, or only hex digits for sha1.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Final, Protocol

import msgspec

from agent_shim.core.errors import DigestError

KNOWN: Final = ("sha512", "sha256", "sha1")
"""Supported algorithms, strongest first."""

# As in Go, any Unicode decimal digit is accepted.
_WORD: Final = re.compile(r"[a-zA-Z\d]+")


class Hasher(Protocol):
    """A hash object from ``hashlib``. It releases the GIL while it hashes large data."""

    @property
    def name(self) -> str: ...

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Digest(msgspec.Struct, frozen=True):
    """A digest: its algorithm and its value, spelled as received."""

    algorithm: str
    value: str

    def __str__(self) -> str:
        return self.value if self.algorithm == "sha1" else f"{self.algorithm}:{self.value}"


class MultipleDigest(msgspec.Struct, frozen=True):
    """One or more digests in the order received, each with a different algorithm."""

    digests: tuple[Digest, ...]

    @classmethod
    def parse(cls, text: str) -> MultipleDigest:
        """Parse a digest string. Raises ``DigestError`` with the same message as the Go agent.

        Unknown algorithms are accepted here. ``hasher`` uses a known one or, if there is none, raises an error.
        """
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

    def hasher(self) -> Hasher:
        """Return a new hash object for the strongest digest. Feed it the data, then pass it to :meth:`check`."""
        given = [digest.algorithm for digest in self.digests]
        for name in KNOWN:
            if name in given:
                return hashlib.new(name, usedforsecurity=False)
        raise DigestError(f"Computing digest from stream: Unable to create digest of unknown algorithm '{given[0]}'")

    def check(self, hasher: Hasher) -> None:
        """Compare the result of ``hasher`` with the expected digest for the same algorithm. Raises ``DigestError`` if
        they differ. The comparison is case-sensitive.
        """
        actual = Digest(hasher.name, hasher.hexdigest())
        if actual not in self.digests:
            (expected,) = (digest for digest in self.digests if digest.algorithm == hasher.name)
            raise DigestError(f"Expected stream to have digest '{expected}' but was '{actual}'")

    def verify(self, data: bytes) -> None:
        """Raise ``DigestError`` if ``data`` does not match the strongest of these digests."""
        hasher = self.hasher()
        hasher.update(data)
        self.check(hasher)
