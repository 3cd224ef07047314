"""Tests actions that upload and download blobs with the stemcell's ``bosh-blobstore-*`` commands."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import socket
import stat
import sys
import tarfile
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_shim.demo.release import archive
from agent_shim.host import process
from tests.support.source import ROOT
from tests.support.waiting import until
from tests.support.world import LocalAgent
from tests.support.world import world as made

PROGRAMS = ROOT / "tests/support/programs"

OPTIONS: dict[str, dict[str, Any]] = {
    "gcs": {
        "bucket_name": "blobs",
        "credentials_source": "static",
        "json_key": '{"private_key": "-----BEGIN KEY-----\\nAAAA\\n-----END KEY-----"}',
        "storage_class": "STANDARD",
        "encryption_key": None,
    },
    "azure-storage": {
        "account_name": "blobs",
        "account_key": "s3cr3t",
        "container_name": "c",
        "environment": "AzureCloud",
    },
}
"""Blobstore options by provider, as the Director sends them."""


def install(world: LocalAgent, provider: str, *argv: str) -> None:
    """Install a wrapper that runs ``argv`` as a provider's command."""
    path = world.paths.bosh_bin / f"bosh-blobstore-{provider}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
    path.chmod(0o755)


async def compile_two_packages(world: LocalAgent, source: str, digest: str) -> str:
    """Compile a package whose source is in the blobstore, and a second one that depends on the first.

    Return the blob id of the first compiled package.
    """
    first = await world.value("compile_package", source, digest, "first", "1", {})
    compiled = {"name": "first", "version": "1", **first["result"]}
    second = await world.value("compile_package", source, digest, "second", "1", {"first": compiled})
    assert second["result"]["blobstore_id"] != first["result"]["blobstore_id"]
    blob_id: str = first["result"]["blobstore_id"]
    return blob_id


SOURCE = archive({"packaging": "echo compiled >$BOSH_INSTALL_TARGET/result"})
DIGEST = hashlib.sha1(SOURCE).hexdigest()


def remaining_files(world: LocalAgent) -> list[str]:
    """Return the names of the files and hidden directories that remain in the temporary directory."""
    return [path.name for path in world.paths.tmp.iterdir() if path.is_file() or path.name.startswith(".")]


# --- gcs and azure-storage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", OPTIONS)
async def test_command_blobstore_stores_and_fetches_packages_and_logs(tmp_path: Path, provider: str) -> None:
    store, options = tmp_path / "store", OPTIONS[provider]
    store.mkdir()
    (store / "source").write_bytes(SOURCE)
    blobstores = [{"provider": provider, "options": options}]
    async with made(tmp_path, env={"bosh": {"blobstores": blobstores}}) as world:
        program = str(PROGRAMS / "bosh_blobstore_directory.py")
        install(world, provider, sys.executable, "-I", program, str(store), json.dumps(options))
        await compile_two_packages(world, "source", DIGEST)
        (world.paths.log / "a.log").write_text("line\n")
        logs = await world.value("fetch_logs", "job", None)

        assert hashlib.sha1((store / logs["blobstore_id"]).read_bytes()).hexdigest() == logs["sha1"]
        with tarfile.open(store / logs["blobstore_id"]) as archived:
            assert "./a.log" in archived.getnames()
        assert len(list(store.iterdir())) == 4
        config = world.paths.bosh_etc / f"blobstore-{provider}.json"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        assert remaining_files(world) == []


async def test_new_blobstore_options_apply_without_a_restart(tmp_path: Path) -> None:
    store, options = tmp_path / "store", OPTIONS["gcs"]
    store.mkdir()
    (store / "source").write_bytes(SOURCE)
    stale = [{"provider": "azure-storage", "options": OPTIONS["azure-storage"] | {"account_key": "old"}}]
    async with made(tmp_path, env={"bosh": {"blobstores": stale}}) as world:
        program = str(PROGRAMS / "bosh_blobstore_directory.py")
        for provider, wanted in OPTIONS.items():
            install(world, provider, sys.executable, "-I", program, str(store), json.dumps(wanted))
        compiling: tuple[Any, ...] = ("compile_package", "source", DIGEST, "p", "1", {})
        said = await world.error(*compiling)
        assert "Shelling out to bosh-blobstore-azure-storage cli: it ended with code 1: 403" in said

        # First, the CPI provides new blobstore options.
        path = tmp_path / "settings-source.json"
        document = json.loads(path.read_text())
        document["env"]["bosh"]["blobstores"][0]["options"] = OPTIONS["azure-storage"]
        path.write_text(json.dumps(document))
        await world.agent.settings.refreshed()
        await world.value(*compiling)

        # Then the Director sends blobstore options, which take precedence over the CPI's.
        news = [{"provider": "gcs", "options": options | {"json_key": "wrong"}}]
        await world.value("update_settings", {"blobstores": news, "trusted_certs": "", "disk_associations": []})
        assert "bosh-blobstore-gcs" in await world.error(*compiling)
        news[0]["options"] = options
        await world.value("update_settings", {"blobstores": news, "trusted_certs": "", "disk_associations": []})
        await world.value(*compiling)
        assert world.asked == []


# --- s3 ---------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def moto(where: Path) -> AsyncIterator[int]:
    """Run moto, a server that imitates S3, on a loopback port. Yield the port."""
    program = ROOT / ".tools/bin/moto_server"
    assert program.exists(), "moto_server is missing: ./dev test-slow installs it"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [str(program), "-H", "127.0.0.1", "-p", str(port)]
    server = process.spawn(argv, env=dict(os.environ), stdout=where / "moto.log", stderr=where / "moto.log")
    try:
        await until(lambda: _listens(port))
        yield port
    finally:
        server.send(signal.SIGTERM)
        await server.terminate(10)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def s3(method: str, url: str, data: bytes = b"") -> bytes:
    """Send a request directly to the S3 server, not through the agent. Return the response body."""
    signed = "AWS4-HMAC-SHA256 Credential=key-id/20260101/us-east-1/s3/aws4_request"  # moto ignores the signature
    headers = {"Content-Type": "application/octet-stream", "Authorization": signed}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=30) as response:
        content: bytes = response.read()
        return content


@pytest.mark.slow
async def test_command_blobstore_works_with_an_s3_store(tmp_path: Path) -> None:
    async with moto(tmp_path) as port:
        bucket = f"http://127.0.0.1:{port}/blobs"
        s3("PUT", bucket)
        s3("PUT", f"{bucket}/source", SOURCE)
        options = {
            "bucket_name": "blobs",
            "access_key_id": "key-id",
            "secret_access_key": "s3cr3t-k3y",
            "credentials_source": "static",
            "region": "us-east-1",
            "host": "127.0.0.1",
            "port": port,
            "use_ssl": False,
            "ssl_verify_peer": True,
            "multipart_upload": True,
        }
        blobstores = [{"provider": "s3", "options": options}]
        async with made(tmp_path, env={"bosh": {"blobstores": blobstores}}) as world:
            program = str(PROGRAMS / "bosh_blobstore_s3.py")
            install(world, "s3", str(ROOT / ".tools/bin/python"), "-I", program)
            blob_id = await compile_two_packages(world, "source", DIGEST)
            assert s3("GET", f"{bucket}/{blob_id}")[:2] == b"\x1f\x8b"

            # The log is large enough for an upload in several parts.
            (world.paths.log / "big.log").write_bytes(os.urandom(20 << 20))
            logs = await world.value("fetch_logs", "job", None)
            assert hashlib.sha1(s3("GET", f"{bucket}/{logs['blobstore_id']}")).hexdigest() == logs["sha1"]

            said = await world.error("compile_package", "missing", DIGEST, "p", "1", {})
            assert "Shelling out to bosh-blobstore-s3 cli: it ended with code 1: cannot get:" in said
            assert "404" in said
            assert "s3cr3t-k3y" not in said
            assert remaining_files(world) == []
