"""Tests digests of streams. ``contract/test_digests.py`` tests digest notation and errors."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from agent_shim.core.digest import MultipleDigest


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_digest_is_independent_of_chunk_size(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    digest = MultipleDigest.parse(f"sha512:{hashlib.sha512(whole).hexdigest()}")
    hasher = digest.hasher()
    for piece in pieces:
        hasher.update(memoryview(piece))

    digest.check(hasher)
    digest.verify(whole)
