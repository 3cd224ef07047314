"""Digest strings as callers write them (checklist D1 to D7), told by the one action that does nothing but check one."""

from __future__ import annotations

import base64
import hashlib

import pytest

from tests.support.world import World

CONTENT = b"a blob"
SHA1 = hashlib.sha1(CONTENT).hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
SHA512 = hashlib.sha512(CONTENT).hexdigest()
WRONG = "0" * 40


async def refused(world: World, checksum: str | None) -> str:
    """Why the content is not taken under this digest; "" when it is."""
    upload = {"blob_id": "b", "checksum": checksum, "payload": base64.b64encode(CONTENT).decode()}
    reply = await world.run("upload_blob", upload)
    kept = world.paths.sensitive_blobs / "b"
    assert kept.exists() is ("value" in reply)
    kept.unlink(missing_ok=True)
    return str(reply["exception"]["message"]).partition(" result: ")[2] if "exception" in reply else ""


async def test_d1_a_bare_digest_is_a_sha1(world: World) -> None:
    assert await refused(world, WRONG) == (
        f"Payload corrupted. Checksum mismatch. Expected '{WRONG}': "
        f"Expected stream to have digest '{WRONG}' but was '{SHA1}'"
    )
    assert await refused(world, SHA1) == ""


@pytest.mark.parametrize(
    "good", [f"{WRONG};sha256:{SHA256}", f"sha256:00;sha512:{SHA512};{WRONG}", f"sha512:{SHA512};sha256:00"]
)
async def test_d2_the_strongest_alone_decides(world: World, good: str) -> None:
    assert await refused(world, good) == ""
    assert "but was 'sha512:" in await refused(world, f"{SHA1};sha512:{'0' * 128};sha256:{SHA256}")


async def test_d3_an_unknown_algorithm_is_passed_over_unless_it_is_alone(world: World) -> None:
    assert await refused(world, "md5:0123") == (
        "Payload corrupted. Checksum mismatch. Expected 'md5:0123': "
        "Computing digest from stream: Unable to create digest of unknown algorithm 'md5'"
    )
    assert await refused(world, f"md5:0123;{SHA1}") == ""


async def test_d4_two_of_one_algorithm_are_refused(world: World) -> None:
    assert await refused(world, f"{SHA1};sha1:{SHA1}") == (
        f"Multiple digests of the same algorithm 'sha1' found in digests '{SHA1};{SHA1}'"
    )


@pytest.mark.parametrize("empty", ["", ";", ";;;", None])
async def test_d5_no_digest_is_no_permission(world: World, empty: str | None) -> None:
    assert await refused(world, empty) == "no digest algorithm found. Supported algorithms: sha1, sha256, sha512"


@pytest.mark.parametrize("text", ["sha1:a:b", "sha1:", ":abc", "sha-1:abc", "abc def", "abc\n", "sha256=00"])
async def test_d6_other_characters_are_refused(world: World, text: str) -> None:
    assert await refused(world, text) == (
        "unable to parse digest string. Digest and algorithm key can only contain alpha-numeric characters"
    )


async def test_d7_a_digest_is_told_in_the_order_it_came_in(world: World) -> None:
    text = await refused(world, f"sha512:00;sha1:{WRONG};;md5:ab;sha256:{SHA256}")

    assert text.startswith(
        f"Payload corrupted. Checksum mismatch. Expected 'sha512:00;{WRONG};md5:ab;sha256:{SHA256}': "
    )
