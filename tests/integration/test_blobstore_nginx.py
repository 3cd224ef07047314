"""Tests actions with the Director's default blobstore, which is a real nginx with DAV, passwords and signed URLs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_shim.demo.pki import Authority
from agent_shim.demo.release import archive
from tests.support.jobs import NETWORKS
from tests.support.nginx import Nginx, nginx
from tests.support.waiting import until
from tests.support.world import LocalAgent
from tests.support.world import world as made

pytestmark = pytest.mark.slow

PASSWORD = "p4ssw0rd"
SOURCE = archive({"packaging": "echo compiled >$BOSH_INSTALL_TARGET/result", "large": os.urandom(3_000_000)})
TEMPLATES = archive({"web/monit": "", "web/bin/run": "#!/bin/sh\n"})
RECORDS = b'{"version": 3, "records": [["10.0.0.9", "other.bosh"]]}'


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Nginx]:
    """Provide a server that requires a user name and a password. It has a package source, templates and DNS records."""
    async with nginx(tmp_path / "nginx") as one:
        one.users(agent=PASSWORD)
        for name, content in (("source", SOURCE), ("templates", TEMPLATES), ("records", RECORDS)):
            one.keep(name, content)
        yield one


@pytest.fixture
async def world(tmp_path: Path, server: Nginx) -> AsyncIterator[LocalAgent]:
    async with made(tmp_path, **settings(server.options(PASSWORD))) as one:
        yield one


def settings(options: dict[str, object]) -> dict[str, Any]:
    return {"env": {"bosh": {"blobstores": [{"provider": "dav", "options": options}]}}}


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def spec(package: dict[str, Any], templates: dict[str, Any]) -> dict[str, Any]:
    """Return the spec for an instance with one job and one package. Their blobs are ``templates`` and ``package``."""
    return {
        "deployment": "dep",
        "job": {"name": "g", "template": "web", "version": "1", "templates": [{"name": "web", "version": "1"}]},
        "index": 0,
        "id": "instance-id",
        "networks": NETWORKS,
        "packages": {"p": {"name": "p", "version": "1", **package}},
        "configuration_hash": "1",
        "rendered_templates_archive": templates,
    }


def is_installed(world: LocalAgent) -> bool:
    result = world.paths.packages / "p/result"
    return result.read_text() == "compiled\n" and (world.paths.jobs / "web/bin/run").is_file()


def remaining_files(world: LocalAgent) -> list[Path]:
    return [path for path in world.paths.tmp.iterdir() if path.is_file() or path.name.startswith(".")]


async def test_dav_blobstore_with_tls_and_password_stores_and_installs_packages(
    world: LocalAgent, server: Nginx
) -> None:
    value = await world.value("compile_package", "source", sha1(SOURCE), "p", "1", {})
    stored = server.path(value["result"]["blobstore_id"]).read_bytes()
    assert sha1(stored) == value["result"]["sha1"]

    await world.value("apply", spec(value["result"], {"blobstore_id": "templates", "sha1": sha1(TEMPLATES)}))
    assert is_installed(world)

    (world.paths.log / "a.log").write_bytes(os.urandom(2_000_000))
    logs = await world.value("fetch_logs", "job", None)
    assert sha1(server.path(logs["blobstore_id"]).read_bytes()) == logs["sha1"]

    assert await world.value("sync_dns", "records", sha1(RECORDS), 3) == "synced"

    def methods_of_successful_requests() -> list[str]:
        return [method for method, status in server.requests() if status < 300]

    # nginx writes to its log only after it has sent the response.
    await until(lambda: len(methods_of_successful_requests()) >= 6)
    methods = methods_of_successful_requests()
    assert (methods.count("GET"), methods.count("PUT")) == (4, 2)
    assert remaining_files(world) == []


async def test_dav_blobstore_with_signed_urls_works_without_a_password(tmp_path: Path, server: Nginx) -> None:
    options = {name: value for name, value in server.options("").items() if name not in ("user", "password")}
    async with made(tmp_path, **settings(options)) as world:
        request = {
            "package_get_signed_url": server.signed("GET", "source"),
            "upload_signed_url": server.signed("PUT", "compiled"),
            "digest": sha1(SOURCE),
            "name": "p",
            "version": "1",
            "deps": {},
        }
        value = await world.value("compile_package_with_signed_url", request)
        stored = server.path("compiled").read_bytes()
        assert value["result"]["sha1"] == f"{sha1(stored)};sha512:{hashlib.sha512(stored).hexdigest()}"

        package = {"blobstore_id": "unused", "sha1": value["result"]["sha1"]}
        package["signed_url"] = server.signed("GET", "compiled")
        payload = base64.b64encode(TEMPLATES).decode()
        await world.value("upload_blob", {"blob_id": "t", "checksum": sha1(TEMPLATES), "payload": payload})
        await world.value("apply", spec(package, {"blobstore_id": "t", "sha1": sha1(TEMPLATES)}))
        assert is_installed(world)

        (world.paths.log / "a.log").write_bytes(os.urandom(2_000_000))
        wanted = {"signed_url": server.signed("PUT", "logs"), "log_type": "job", "filters": []}
        logs = await world.value("fetch_logs_with_signed_url", wanted)
        assert logs["sha1"].startswith(f"{sha1(server.path('logs').read_bytes())};sha512:")

        names = {"signed_url": server.signed("GET", "records"), "multi_digest": sha1(RECORDS), "version": 3}
        assert await world.value("sync_dns_with_signed_url", names) == "synced"
        assert {status for _, status in server.requests()} <= {200, 201, 204}
        assert remaining_files(world) == []


@pytest.mark.parametrize(
    ("change", "status"),
    [({"seconds": -60}, 410), ({"method": "GET"}, 403)],
    ids=["too late", "for another method"],
)
async def test_error_for_a_rejected_signed_url_contains_only_host_and_status(
    world: LocalAgent, server: Nginx, change: dict[str, Any], status: int
) -> None:
    """The URL's signature may still be valid for another request."""
    url = server.signed(**{"method": "PUT", "blob_id": "logs", **change})
    said = await world.error("fetch_logs_with_signed_url", {"signed_url": url, "log_type": "job", "filters": []})

    assert f"Error executing PUT, response was {status} from {server.host}" in said
    assert "st=" not in said
    assert "/signed/" not in said
    assert remaining_files(world) == []


async def test_wrong_dav_password_or_ca_is_reported_and_can_be_replaced_without_a_restart(
    world: LocalAgent, server: Nginx
) -> None:
    compiling: tuple[Any, ...] = ("compile_package", "source", sha1(SOURCE), "p", "1", {})
    server.users(agent="n3w")
    said = await world.error(*compiling)
    assert f"Error executing GET, response was 401 from {server.host}" in said
    assert PASSWORD not in said

    async def news(options: dict[str, object]) -> None:
        stores = [{"provider": "dav", "options": options}]
        await world.value("update_settings", {"blobstores": stores, "trusted_certs": "", "disk_associations": []})

    await news(server.options("n3w") | {"tls": {"cert": {"ca": Authority("other").ca}}})
    said = await world.error(*compiling)
    assert f"{server.host}: its certificate is not trusted: " in said

    await news(server.options("n3w"))
    await world.value(*compiling)
    assert world.asked == []
    assert json.loads(world.paths.update_settings.read_bytes())["blobstores"][0]["options"]["password"] == "n3w"
