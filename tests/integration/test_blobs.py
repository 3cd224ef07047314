"""Tests where blobs are fetched from and in which order, when downloads are retried, and how missing or corrupt blobs
are reported.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_shim.bulk.blobs import Blobs
from agent_shim.bulk.protocol import BlobRef
from agent_shim.bulk.routes import TransferTiming
from agent_shim.core.errors import BlobError, DigestError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from tests.support import http
from tests.support.http import BlobServer, http_proxy

FAST = TransferTiming(stall=1.0, least=1024, pause=0.01)
SURE = TransferTiming(pause=0.01)
"""Timeouts long enough that a server on a busy machine is not mistaken for a stalled one."""
ID = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
SHARD = "d7"
BLOB = os.urandom(200_000)
SHA1 = hashlib.sha1(BLOB, usedforsecurity=False).hexdigest()
SHA256 = "sha256:" + hashlib.sha256(BLOB).hexdigest()
MISMATCH = f"Expected stream to have digest '{'0' * 40}' but was '{SHA1}'"


@pytest.fixture
def server(server: BlobServer) -> BlobServer:
    """Provide a server that has the blob at ``/signed`` and at the path that the DAV provider derives from its id."""
    server.blobs = {"/signed": BLOB, f"/{SHARD}/{ID}": BLOB}
    return server


@pytest.fixture
def timing() -> TransferTiming:
    return SURE


@pytest.fixture
async def blobs(paths: Paths, server: BlobServer, timing: TransferTiming) -> AsyncIterator[Blobs]:
    async with Blobs(Blobstore("dav", {"endpoint": server.url}), paths, timing) as blobs:
        yield blobs


async def content(blobs: Blobs, **ref: str) -> bytes:
    async with blobs.fetched(BlobRef(**ref)) as file:  # type: ignore[arg-type]
        return file.read()


async def failure(blobs: Blobs, **ref: str) -> str:
    with pytest.raises(BlobError) as caught:
        await content(blobs, **ref)
    return str(caught.value)


def left_open() -> list[str]:
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(fd.readlink()))
        except OSError:
            continue
    return [name for name in found if "vcap" in name]


# --- order of sources -------------------------------------------------------------------------------------------------


async def test_signed_url_takes_precedence_over_the_blob_id(paths: Paths, server: BlobServer, blobs: Blobs) -> None:
    (paths.blobs / ID).write_bytes(b"another")
    url = f"{server.url}/signed?sig=x"

    assert await content(blobs, blob_id="../../x", signed_url=url, digest=SHA256) == BLOB
    assert server.requests[0].target == "/signed?sig=x"


async def test_local_blobs_take_precedence_over_the_blobstore(paths: Paths, server: BlobServer, blobs: Blobs) -> None:
    places = [paths.sensitive_blobs / ID, paths.blobs / ID]
    for place in places:
        place.write_bytes(str(place).encode())
    for place in places:
        digest = f"sha256:{hashlib.sha256(str(place).encode()).hexdigest()}"
        assert await content(blobs, blob_id=ID, digest=digest) == str(place).encode()
        place.unlink()

    assert server.requests == []
    assert await content(blobs, blob_id=ID, digest=SHA1) == BLOB
    assert len(server.requests) == 1


@pytest.mark.parametrize("blob_id", ["a/b", "..", "../x", "a..b", ".hidden", "-option", "a\0b", "a\nb", "x" * 300])
async def test_invalid_blob_id_is_rejected(server: BlobServer, blobs: Blobs, blob_id: str) -> None:
    assert "it is not a plain name" in await failure(blobs, blob_id=blob_id, digest=SHA1)
    assert server.requests == []


async def test_proxies_in_the_settings_override_proxy_variables(
    paths: Paths, server: BlobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_shim.bulk.routes.is_excepted", lambda *_: False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with http_proxy() as proxy:
        store = Blobstore("dav", {"endpoint": server.url}, {"http_proxy": f"http://127.0.0.1:{proxy.port}"})
        async with Blobs(store, paths, SURE) as blobs:
            assert await content(blobs, blob_id=ID, digest=SHA1) == BLOB
        assert [seen.target for seen in proxy.seen] == [f"{server.url}/{SHARD}/{ID}"]


# --- digests ----------------------------------------------------------------------------------------------------------


async def test_local_blob_with_a_wrong_digest_fails_without_a_download(
    paths: Paths, server: BlobServer, blobs: Blobs
) -> None:
    (paths.blobs / ID).write_bytes(BLOB)

    assert await failure(blobs, blob_id=ID, digest="0" * 40) == f"Checking blob '{ID}': {MISMATCH}"
    assert server.requests == []


@pytest.mark.parametrize("digest", ["", "md5:00", "sha1:a:b"])
async def test_blob_without_a_valid_digest_is_rejected(paths: Paths, blobs: Blobs, digest: str) -> None:
    (paths.blobs / ID).write_bytes(BLOB)
    with pytest.raises((BlobError, DigestError), match="digest"):
        await content(blobs, blob_id=ID, digest=digest)


# --- retries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "timing"),
    [("500", SURE), ("404", SURE), (http.HALF, SURE), (http.STALL, FAST), (http.WRONG, SURE)],
)
async def test_failed_download_is_retried(server: BlobServer, blobs: Blobs, first: str) -> None:
    for ref in ({"blob_id": ID}, {"signed_url": f"{server.url}/signed"}):
        server.plan = [first, first]
        server.requests.clear()

        assert await content(blobs, digest=SHA1, **ref) == BLOB
        assert len(server.requests) == 3


async def test_download_error_reports_the_last_attempt(server: BlobServer, blobs: Blobs) -> None:
    server.plan = ["500", "500", "403"] * 2
    url = f"{server.url}/signed?sig=s3cr3t"

    assert await failure(blobs, signed_url=url, digest=SHA1) == (
        f"Failed to download blob: Error executing GET, response was 403 from {server.host}"
    )
    assert await failure(blobs, blob_id=ID, digest=SHA1) == (
        f"Getting blob from inner blobstore: Error executing GET, response was 403 from {server.host}"
    )
    assert len(server.requests) == 6


@pytest.mark.parametrize("timing", [FAST])
async def test_download_attempts_leave_no_files_or_descriptors(paths: Paths, server: BlobServer, blobs: Blobs) -> None:
    server.plan = ["500", http.HALF, http.WRONG, http.STALL]
    await failure(blobs, blob_id=ID, digest=SHA1)
    await content(blobs, blob_id=ID, digest=SHA1)

    assert [path for path in paths.base.rglob("*") if path.is_file()] == []
    assert left_open() == []


@pytest.mark.parametrize("size", [100_000, 200_000 - 10])
async def test_full_disk_fails_a_download_without_a_retry(
    paths: Paths, server: BlobServer, blobs: Blobs, size: int
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        said = await failure(blobs, blob_id=ID, digest=SHA1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    told = f"Getting blob from inner blobstore: cannot keep the blob in {paths.tmp}: File too large, "
    assert re.fullmatch(re.escape(told) + r"\d+ MiB are free", said)
    assert len(server.requests) == 1
    assert left_open() == []


# --- storing ----------------------------------------------------------------------------------------------------------


async def test_upload_to_a_signed_url_sends_extra_headers_and_is_not_retried(
    server: BlobServer, blobs: Blobs, tmp_path: Path
) -> None:
    """As in the Go agent, the caller has to retry the request."""
    (tmp_path / "file").write_bytes(b"result")
    assert await blobs.put(tmp_path / "file", f"{server.url}/new?sig=x", {"x-ms-blob-type": "blockblob"}) == ""
    server.plan = ["500"]
    with pytest.raises(BlobError, match=f"^Error executing PUT, response was 500 from {server.host}$"):
        await blobs.put(tmp_path / "file", f"{server.url}/new?sig=x", {})

    assert server.blobs["/new"] == b"result"
    assert server.requests[0].headers["x-ms-blob-type"] == "blockblob"
    assert len(server.requests) == 2
