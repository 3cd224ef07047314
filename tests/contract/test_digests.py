"""Tests digest formats with ``upload_blob``, which needs no blobstore.

The codes ``d1`` to ``d7`` in test names are explained in tests/support/protocol_facts.py.
"""

from __future__ import annotations

import base64
import hashlib

import pytest

from tests.support.world import LocalAgent

CONTENT = b"a blob"
SHA1 = hashlib.sha1(CONTENT).hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
SHA512 = hashlib.sha512(CONTENT).hexdigest()
WRONG = "0" * 40
ARGUMENT = "Extracting method arguments from payload: Unmarshalling action argument: "


async def refused(world: LocalAgent, checksum: str | None) -> str:
    """Upload a blob with the digest ``checksum``. Return the error if it is rejected, or "" if it is accepted."""
    upload = {"blob_id": "b", "checksum": checksum, "payload": base64.b64encode(CONTENT).decode()}
    reply = await world.run("upload_blob", upload)
    kept = world.paths.sensitive_blobs / "b"
    assert kept.exists() is ("value" in reply)
    kept.unlink(missing_ok=True)
    text = str(reply["exception"]["message"]) if "exception" in reply else ""
    return text.partition(" result: ")[2].removeprefix(ARGUMENT)


async def test_d1_digest_without_an_algorithm_is_treated_as_sha1(world: LocalAgent) -> None:
    for wrong in (WRONG, SHA1.upper()):
        assert await refused(world, wrong) == (
            f"Payload corrupted. Checksum mismatch. Expected '{wrong}': "
            f"Expected stream to have digest '{wrong}' but was '{SHA1}'"
        )
    assert await refused(world, SHA1) == ""


@pytest.mark.attack("a blobstore delivers a different blob than the one requested")
@pytest.mark.parametrize(
    "good", [f"{WRONG};sha256:{SHA256}", f"sha256:00;sha512:{SHA512};{WRONG}", f"sha512:{SHA512};sha256:00"]
)
async def test_d2_only_the_strongest_digest_is_checked(world: LocalAgent, good: str) -> None:
    assert await refused(world, good) == ""
    assert "but was 'sha512:" in await refused(world, f"{SHA1};sha512:{'0' * 128};sha256:{SHA256}")


async def test_d3_unknown_digest_algorithm_is_ignored_unless_it_is_the_only_one(world: LocalAgent) -> None:
    assert await refused(world, "md5:0123") == (
        "Payload corrupted. Checksum mismatch. Expected 'md5:0123': "
        "Computing digest from stream: Unable to create digest of unknown algorithm 'md5'"
    )
    assert await refused(world, f"md5:0123;{SHA1}") == ""


async def test_d4_two_digests_with_the_same_algorithm_are_rejected(world: LocalAgent) -> None:
    assert await refused(world, f"{SHA1};sha1:{SHA1}") == (
        f"Multiple digests of the same algorithm 'sha1' found in digests '{SHA1};{SHA1}'"
    )


@pytest.mark.attack("a blobstore delivers a different blob than the one requested")
@pytest.mark.parametrize("empty", ["", ";", ";;;"])
async def test_d5_blob_without_a_digest_is_rejected(world: LocalAgent, empty: str | None) -> None:
    assert await refused(world, empty) == "no digest algorithm found. Supported algorithms: sha1, sha256, sha512"


async def test_d5_null_digest_is_rejected(world: LocalAgent) -> None:
    assert (await refused(world, None)).startswith("Payload corrupted. Checksum mismatch. Expected 'null': ")


async def test_invalid_digests_are_rejected_even_if_the_blob_is_not_needed(world: LocalAgent) -> None:
    """`sync_dns` with an old version and `apply` without a configuration hash fetch no blob."""
    world.paths.dns_records.parent.mkdir(parents=True, exist_ok=True)
    world.paths.dns_records.write_text('{"version": 5, "records": []}')
    archive = {"sha1": "a:b:c", "blobstore_id": "b"}

    for method, *arguments in (
        ("sync_dns", "blob", "a:b:c", 4),
        ("sync_dns_with_signed_url", {"multi_digest": "a:b:c", "version": 4}),
        ("apply", {"packages": {"p": {"name": "p", "sha1": "a:b:c"}}}),
        ("apply", {"rendered_templates_archive": archive}),
        ("apply", {"rendered_templates_archive": archive | {"sha1": ""}}),
        ("compile_package", "blob", "a:b:c", "", "", {}),
    ):
        assert ARGUMENT in await world.error(str(method), *arguments)
    assert not world.paths.spec.exists()
    assert await world.value("sync_dns", "blob", WRONG, 4) == "synced"


async def test_apply_rejects_a_package_without_a_digest(world: LocalAgent) -> None:
    package = {"name": "nginx", "version": "1", "blobstore_id": "not fetched"}

    error = await world.error("apply", {"packages": {"nginx": package}})

    assert error.endswith("Persisting apply spec: package nginx: no digests have been provided")


async def test_templates_archive_without_id_and_digest_is_accepted_and_stored_with_a_null_digest(
    world: LocalAgent,
) -> None:
    assert await world.value("apply", {"rendered_templates_archive": {"sha1": "", "blobstore_id": ""}}) == "applied"

    stored = (await world.value("get_state"))["rendered_templates_archive"]
    assert stored == {"sha1": None, "blobstore_id": ""}


@pytest.mark.parametrize("text", ["sha1:a:b", "sha1:", ":abc", "sha-1:abc", "abc def", "abc\n", "sha256=00"])
async def test_d6_digest_with_invalid_characters_is_rejected(world: LocalAgent, text: str) -> None:
    assert await refused(world, text) == (
        "unable to parse digest string. Digest and algorithm key can only contain alpha-numeric characters"
    )


async def test_d7_digests_are_reported_in_their_original_order(world: LocalAgent) -> None:
    text = await refused(world, f"sha512:00;sha1:{WRONG};;md5:ab;sha256:{SHA256}")

    assert text.startswith(
        f"Payload corrupted. Checksum mismatch. Expected 'sha512:00;{WRONG};md5:ab;sha256:{SHA256}': "
    )
