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
    ("text", "told"),
    [
        ("abc123", "abc123"),
        ("sha1:abc123", "abc123"),
        ("sha256:abc", "sha256:abc"),
        ("abc;sha512:def", "abc;sha512:def"),
        ("sha512:def;abc", "sha512:def;abc"),
        (";abc;;sha256:def;", "abc;sha256:def"),
        ("md5:abc;sha1:def", "md5:abc;def"),
        ("sha1:ABC", "ABC"),
    ],
)
def test_strings_are_told_as_the_director_tells_them(text: str, told: str) -> None:
    """sha1 stands bare, all others by name, the order is kept."""
    assert str(MultipleDigest.parse(text)) == told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no digest algorithm found. Supported algorithms: sha1, sha256, sha512"),
        (";;", "no digest algorithm found. Supported algorithms: sha1, sha256, sha512"),
        (
            "sha1:a:b",
            "unable to parse digest string. Digest and algorithm key can only contain alpha-numeric characters",
        ),
        (
            "sha1:",
            "unable to parse digest string. Digest and algorithm key can only contain alpha-numeric characters",
        ),
        (
            ":abc",
            "unable to parse digest string. Digest and algorithm key can only contain alpha-numeric characters",
        ),
        (
            "abc\n",
            "unable to parse digest string. Digest and algorithm key can only contain alpha-numeric characters",
        ),
        ("abc;sha1:def", "Multiple digests of the same algorithm 'sha1' found in digests 'abc;def'"),
        ("md5:a;md5:b", "Multiple digests of the same algorithm 'md5' found in digests 'md5:a;md5:b'"),
    ],
)
def test_wrong_strings_are_refused_in_the_words_of_the_go_agent(text: str, message: str) -> None:
    """Callers see these texts; they are kept to the letter."""
    with pytest.raises(DigestError) as caught:
        MultipleDigest.parse(text)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        SHA1,
        f"sha256:{SHA256}",
        f"{'0' * 40};sha256:{SHA256}",
        f"sha512:{SHA512};sha256:00;00",
        f"md5:00;{SHA1}",
    ],
)
def test_the_strongest_alone_decides(text: str) -> None:
    """A weaker digest beside it may be wrong, an unknown one is passed over."""
    MultipleDigest.parse(text).verify(DATA)


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
