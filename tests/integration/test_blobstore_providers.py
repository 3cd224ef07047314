"""Tests each blobstore provider with a real directory, a real server or a real command."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import stat
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_shim.bulk.providers import Provider, harmless, provider, trusted_ca
from agent_shim.bulk.routes import TransferTiming
from agent_shim.bulk.transfer import Transfer
from agent_shim.core.errors import BlobError, HostError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from tests.support.http import http_server
from tests.support.waiting import until

ID = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
SHARD = "d7"
"""The first byte of the SHA-1 of ``ID``. A DAV blobstore keeps this blob in the directory of that name."""


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path / "vcap")
    for directory in (paths.tmp, paths.blobs, paths.bosh_etc, paths.bosh_bin):
        directory.mkdir(parents=True)
    return paths


@pytest.fixture
async def transfer(paths: Paths) -> AsyncIterator[Transfer]:
    async with Transfer("", TransferTiming(), paths.tmp) as transfer:
        yield transfer


def made(
    paths: Paths, kind: str, transfer: Transfer | None = None, proxies: dict[str, str] | None = None, **options: Any
) -> Provider:
    def client() -> Transfer:
        assert transfer is not None
        return transfer

    return provider(Blobstore(kind, options, proxies or {}), paths, client)


async def content(store: Provider, blob_id: str = ID) -> bytes:
    hasher = hashlib.sha256()
    with await store.get(blob_id, hasher) as file:
        file.seek(0)
        found = file.read()
    assert hasher.hexdigest() == hashlib.sha256(found).hexdigest()
    return found


# --- local blobstore --------------------------------------------------------------------------------------------------


async def test_local_blobstore_stores_and_returns_blobs(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blob is synced to disk before it is renamed. Otherwise, a crash could leave an empty file under its name."""
    (tmp_path / "file").write_bytes(b"data")
    synced: list[tuple[int, bool]] = []
    target = tmp_path / "store" / ID
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, target.exists())))
    store = made(paths, "local", blobstore_path=str(tmp_path / "store"))
    await store.put(ID, tmp_path / "file")

    assert await content(store) == b"data"
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o770
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [entry.name for entry in (tmp_path / "store").iterdir()] == [ID]
    assert synced[-2:] == [(target.stat().st_ino, False), ((tmp_path / "store").stat().st_ino, True)]


async def test_local_blobstore_reports_a_full_disk_and_removes_the_file(paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(200_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # stands in for a full disk
    try:
        with pytest.raises(HostError, match=f"^cannot write {tmp_path}/store/{ID}: File too large$"):
            await made(paths, "local", blobstore_path=str(tmp_path / "store")).put(ID, tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert list((tmp_path / "store").iterdir()) == []


async def test_create_env_cache_path_maps_to_the_uploaded_blobs_directory(paths: Paths) -> None:
    """``bosh create-env`` configures the cache path, even though it uploads the blobs to another directory."""
    (paths.blobs / ID).write_bytes(b"data")

    assert await content(made(paths, "local", blobstore_path="/var/vcap/micro_bosh/data/cache")) == b"data"


@pytest.mark.attack("a request passes a path or an option as the name of a blob, a blobstore provider or an agent")
@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("local", {}, "^Validating blobstore: missing blobstore_path$"),
        ("local", {"blobstore_path": 7}, "^Validating blobstore: blobstore_path must be a string$"),
        *(("dav", given, "cannot use the blobstore dav: .*endpoint") for given in ({}, {"endpoint": None})),
        ("dav", {"endpoint": 7}, "cannot use the blobstore dav: .*endpoint"),
        *((name, {}, "unknown provider") for name in ("../x", "a/b", "", "x y", "-x")),
    ],
)
def test_invalid_blobstore_is_rejected(paths: Paths, kind: str, options: dict[str, Any], text: str) -> None:
    """The agent inserts the provider name into a path and a command, so the name must not contain slashes or spaces."""
    with pytest.raises(BlobError, match=text):
        made(paths, kind, **options)


@pytest.mark.parametrize("what", ["nothing", "directory", "link"])
async def test_local_blob_must_be_a_regular_file(paths: Paths, tmp_path: Path, what: str) -> None:
    if what == "directory":
        (tmp_path / ID).mkdir()
    elif what == "link":
        (tmp_path / ID).symlink_to("/etc/passwd")
    with pytest.raises(BlobError, match=f"cannot open {tmp_path}/{ID}: "):
        await content(made(paths, "local", blobstore_path=str(tmp_path)))


# --- dav --------------------------------------------------------------------------------------------------------------


async def test_dav_blobstore_stores_and_returns_blobs(paths: Paths, tmp_path: Path, transfer: Transfer) -> None:
    (tmp_path / "file").write_bytes(b"data")
    async with http_server() as server:
        server.user = "agent:päss:word"
        options: dict[str, Any] = {
            "endpoint": f"{server.url}/store/",
            "user": "agent",
            "password": "päss:word",
            "secret": None,
        }
        store = made(paths, "dav", transfer, **options)
        await store.put(ID, tmp_path / "file")

        assert server.blobs == {f"/store/{SHARD}/{ID}": b"data"}
        assert await content(store) == b"data"


async def test_dav_without_a_user_escapes_the_path_and_sends_no_credentials(paths: Paths, transfer: Transfer) -> None:
    async with http_server() as server:
        store = made(paths, "dav", transfer, endpoint=server.url, user=None, password=None)
        with pytest.raises(BlobError):
            await content(store, "a ?b#%c")

        assert server.requests[0].target == "/c0/a%20%3Fb%23%25c"
        assert "authorization" not in server.requests[0].headers


async def test_error_for_a_wrong_dav_password_contains_only_host_and_status(paths: Paths, transfer: Transfer) -> None:
    async with http_server() as server:
        server.user = "agent:other"
        with pytest.raises(BlobError) as caught:
            await content(made(paths, "dav", transfer, endpoint=server.url, user="agent", password="s3cr3t"))

        assert str(caught.value) == f"Error executing GET, response was 401 from {server.host}"


# --- external programs ------------------------------------------------------------------------------------------------


def program(paths: Paths, body: str) -> None:
    """Install the shell code ``body`` as ``bosh-blobstore-x``, which is called with ``-c CONFIG get|put FROM TO``."""
    path = paths.bosh_bin / "bosh-blobstore-x"
    path.write_text(f"#!/bin/sh\nset -e\nconfig=$2 what=$3 from=$4 to=$5\n{body}\n")
    path.chmod(0o755)


async def test_command_blobstore_gets_and_puts_blobs(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://environment:1")
    monkeypatch.setenv("NO_PROXY", "here")
    told = f'echo "$https_proxy $HTTPS_PROXY $NO_PROXY" >"{tmp_path}/told"'
    program(paths, f'{told}; [ $what = get ] && cp "{tmp_path}/$from" "$to" || cp "$from" "{tmp_path}/$to"')
    (tmp_path / "file").write_bytes(b"data")
    store = made(paths, "x", proxies={"https_proxy": "http://s:2"}, bucket="b", nested={"key": "k"})
    await store.put(ID, tmp_path / "file")

    assert await content(store) == b"data"
    assert (tmp_path / "told").read_text() == "http://s:2 http://s:2 here\n"
    config = paths.bosh_etc / "blobstore-x.json"
    assert json.loads(config.read_bytes()) == {"bucket": "b", "nested": {"key": "k"}}
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert list(paths.tmp.iterdir()) == []


async def test_blobstore_command_may_replace_the_target_file(paths: Paths) -> None:
    program(paths, 'echo new >"$to.part"; mv "$to.part" "$to"')
    assert await content(made(paths, "x")) == b"new\n"
    program(paths, 'echo half >"$to.part"; exit 1')
    with pytest.raises(BlobError):
        await content(made(paths, "x"))

    assert list(paths.tmp.iterdir()) == []


@pytest.mark.attack("a reader finds arguments, values or signed URLs in an audit record or an error")
async def test_failed_blobstore_command_is_reported_without_secrets(paths: Paths) -> None:
    program(
        paths,
        'echo "Error: GET https://me:word@blobs.example/b?sig=s3cr3t said 403" >&2; cat "$config"; '
        'echo "and: https://x/y?token=t0k3n"; exit 3',
    )
    store = made(paths, "x", host="blobs.example", secret_access_key="p4ssphrase", json_key='{"private": "k3y"}')
    with pytest.raises(BlobError) as caught:
        await content(store)

    said = str(caught.value)
    assert said.startswith(
        "Shelling out to bosh-blobstore-x cli: it ended with code 3: Error: GET https://blobs.example/b"
    )
    assert "said 403" in said
    assert not any(secret in said for secret in ("s3cr3t", "word", "p4ssphrase", "k3y", "t0k3n"))
    assert list(paths.tmp.iterdir()) == []


async def test_missing_or_slow_blobstore_command_is_reported(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BlobError, match="^executable bosh-blobstore-x not found in PATH$"):
        await content(made(paths, "x"))

    monkeypatch.setattr("agent_shim.bulk.providers.PROGRAM_TIMEOUT_S", 0.1)
    program(paths, "sleep 1000")
    with pytest.raises(BlobError, match="it took longer than"):
        await content(made(paths, "x"))


async def test_cancelled_blobstore_command_is_killed_with_its_children(paths: Paths, tmp_path: Path) -> None:
    program(paths, f"echo $$ >{tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 1000")
    getting = asyncio.create_task(content(made(paths, "x")))
    await until((tmp_path / "pid").exists)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting

    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    assert list(paths.tmp.iterdir()) == []


@pytest.mark.attack("a blobstore sends endless data")
async def test_endless_blobstore_command_output_is_not_kept_in_memory(paths: Paths) -> None:
    program(paths, "head -c 64000000 /dev/zero | tr '\\0' x >&2; echo the end; exit 1")
    tracemalloc.start()
    try:
        with pytest.raises(BlobError, match="xthe end$"):
            await content(made(paths, "x"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 16_000_000


# --- other providers --------------------------------------------------------------------------------------------------


async def test_dummy_blobstore_accepts_uploads_and_returns_no_blob(paths: Paths, tmp_path: Path) -> None:
    """The ``dummy`` provider is meant for agents that never handle a blob."""
    store = made(paths, "dummy")
    await store.put(ID, tmp_path / "file")
    with pytest.raises(BlobError, match=f"cannot get {ID}: the blobstore is a dummy"):
        await store.get(ID, hashlib.sha256())


@pytest.mark.parametrize(
    ("options", "ca"),
    [
        ({"tls": {"cert": {"ca": "PEM"}}}, "PEM"),
        ({"tls": {"cert": {"ca": None}}}, ""),
        ({"tls": {"cert": "PEM"}}, ""),
        ({"tls": None}, ""),
        ({"tls": True}, ""),
        ({}, ""),
    ],
)
def test_blobstore_ca_is_read_from_the_tls_options(options: dict[str, Any], ca: str) -> None:
    assert trusted_ca(Blobstore("x", options)) == ca


def test_blobstore_command_error_is_one_line_without_secrets() -> None:
    """Commands may quote a single line of a multi-line key, so each line is redacted separately."""
    options = {"json_key": "-----BEGIN KEY-----\nAAAABBBB\n-----END KEY-----\n", "short": "no"}

    assert harmless("x" * 5000 + "\n\nthe\tend\n", {}) == "x" * 992 + " the end"
    assert harmless("bad line AAAABBBB, no", options) == "bad line …, no"
