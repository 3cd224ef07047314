"""Tests the ``sync_dns`` (``a26``) and ``sync_dns_with_signed_url`` (``a27``) actions."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest

from agent_shim.daemon import boot
from agent_shim.daemon.job_recovery import JobRecovery
from tests.support.http import BlobServer
from tests.support.world import LocalAgent

HEADERS = {"x-ms-blob-type": "blockblob"}


def records(version: int, *names: str) -> bytes:
    return json.dumps({"version": version, "records": [["10.0.0.9", name] for name in names or ["a.b.bosh"]]}).encode()


def signed(server: BlobServer, content: bytes, version: int, **members: Any) -> dict[str, Any]:
    """Store the records on the server, and return a request that refers to them."""
    server.blobs[f"/{version}"] = content
    return {
        "signed_url": f"{server.url}/{version}?st=secret",
        "multi_digest": f"{hashlib.sha1(content).hexdigest()};sha512:{hashlib.sha512(content).hexdigest()}",
        "version": version,
        "blobstore_headers": HEADERS,
    } | members


async def sync(world: LocalAgent, request: dict[str, Any]) -> dict[str, Any]:
    return await world.call("sync_dns_with_signed_url", request)


async def test_a27_dns_records_are_fetched_from_a_signed_url(world: LocalAgent, server: BlobServer) -> None:
    content = records(7, "one.bosh", "two.bosh")

    assert await sync(world, signed(server, content, 7)) == {"value": "synced"}
    assert world.paths.dns_records.read_bytes() == content
    assert (world.paths.etc / "hosts").read_text().endswith("\n10.0.0.9 one.bosh\n10.0.0.9 two.bosh\n")
    (get,) = server.requests
    assert (get.method, get.target, get.headers["x-ms-blob-type"]) == ("GET", "/7?st=secret", "blockblob")


async def test_a27_dns_records_that_are_not_newer_are_not_fetched(world: LocalAgent, server: BlobServer) -> None:
    await sync(world, signed(server, records(7), 7))
    for version in (6, 7):
        assert await sync(world, signed(server, b"", version)) == {"value": "synced"}
        assert await world.call("sync_dns", "no-such-blob", "00", version) == {"value": "synced"}

    assert len(server.requests) == 1


async def test_a27_dns_sync_with_a_wrong_version_or_digest_changes_nothing(
    world: LocalAgent, server: BlobServer
) -> None:
    await sync(world, signed(server, records(7), 7))
    wrong = await world.error("sync_dns_with_signed_url", signed(server, records(9), 8))
    broken = await world.error("sync_dns_with_signed_url", signed(server, records(8), 8, multi_digest="sha1:a:b"))

    assert wrong == (
        "Action Failed sync_dns_with_signed_url: "
        "version from unpacked dns blob does not match version supplied by director"
    )
    assert "unable to parse digest string" in broken
    assert json.loads(world.paths.dns_records.read_bytes())["version"] == 7


@pytest.mark.slow
async def test_a27_unavailable_signed_url_is_reported_without_its_signature_after_three_attempts(
    world: LocalAgent, server: BlobServer
) -> None:
    server.plan = ["500"] * 3
    asking = asyncio.create_task(world.error("sync_dns_with_signed_url", signed(server, records(7), 7)))
    assert await world.call("ping") == {"value": "pong"}
    assert not asking.done()
    error = await asking

    assert error == (
        "Action Failed sync_dns_with_signed_url: fetching new DNS records: Failed to download blob: "
        f"Error executing GET, response was 500 from {server.host}"
    )
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (None, "no digest algorithm found"),
        ({}, "no digest algorithm found"),
        ({"multi_digest": "00"}, "Both signedURL and blobID are blank which is invalid"),
    ],
)
async def test_a27_incomplete_dns_sync_request_is_rejected(world: LocalAgent, request_: Any, why: str) -> None:
    error = await world.error("sync_dns_with_signed_url", request_)

    assert error.startswith(f"Action Failed sync_dns_with_signed_url: fetching new DNS records: {why}")


async def test_a26_dns_sync_with_a_missing_blob_fails(world: LocalAgent) -> None:
    error = await world.error("sync_dns", "no-such-blob", "00", 7)

    assert error.startswith("Action Failed sync_dns: getting no-such-blob from blobstore: Getting blob from inner ")


@pytest.mark.parametrize("version", [-1, "7", 7.5])
async def test_a26_dns_version_that_is_not_a_natural_number_is_rejected(
    world: LocalAgent, server: BlobServer, version: Any
) -> None:
    request = signed(server, b"", 7) | {"version": version}

    assert "Unmarshalling action argument: " in await world.error("sync_dns_with_signed_url", request)
    assert "Unmarshalling action argument: " in await world.error("sync_dns", "id", "00", version)


async def test_a26_dns_records_with_a_large_version_are_stored(world: LocalAgent, server: BlobServer) -> None:
    version = 2**64 - 1

    assert await sync(world, signed(server, records(version), version)) == {"value": "synced"}
    assert json.loads(world.paths.dns_records.read_bytes())["version"] == version


async def test_dns_names_are_restored_in_a_new_container(world: LocalAgent, server: BlobServer) -> None:
    await sync(world, signed(server, records(7, "one.bosh"), 7))
    (world.paths.etc / "hosts").write_text("127.0.0.1 localhost\n")

    steps = boot.steps(world.agent, JobRecovery(world.agent, world.events.append))
    await boot.boot([step for step in steps if step.name == "names of other instances"])

    assert "\n10.0.0.9 one.bosh\n" in (world.paths.etc / "hosts").read_text()
