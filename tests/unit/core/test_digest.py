"""Digest strings as the Director sends them: parsing, refusals and their words, comparison."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_shim.core.digest import MultipleDigest
from agent_shim.core.errors import DigestError

DATA = b"some bytes"
SHA1 = hashlib.sha1(DATA, usedforsecurity=False).hexdigest()
SHA256 = hashlib.sha256(DATA).hexdigest()
SHA512 = hashlib.sha512(DATA).hexdigest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("00", f"Expected stream to have digest '00' but was '{SHA1}'"),
        (SHA1.upper(), f"Expected stream to have digest '{SHA1.upper()}' but was '{SHA1}'"),
        (f"{SHA1};sha256:00", f"Expected stream to have digest 'sha256:00' but was 'sha256:{SHA256}'"),
        ("md5:00", "Computing digest from stream: Unable to create digest of unknown algorithm 'md5'"),
    ],
)
def test_a_difference_is_told(text: str, message: str) -> None:
    """The text has the expected and the actual digest."""
    with pytest.raises(DigestError) as caught:
        MultipleDigest.parse(text).verify(DATA)

    assert str(caught.value) == message


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_pieces_hash_like_the_whole(pieces: list[bytes]) -> None:
    """However the stream is cut."""
    whole = b"".join(pieces)
    digest = MultipleDigest.parse(f"sha512:{hashlib.sha512(whole).hexdigest()}")
    hasher = digest.hasher()
    for piece in pieces:
        hasher.update(memoryview(piece))

    digest.check(hasher)
    digest.verify(whole)
