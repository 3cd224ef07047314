"""Tests the agent's HTTPS endpoint for the bosh CLI over a real socket.

The codes ``t9`` and ``t10`` in test names are explained in tests/support/protocol_facts.py.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from agent_shim.edges.bus.https import HttpsBus
from tests.support.create_env import AgentClient, authority, basic, on_https, trusting
from tests.support.world import LocalAgent


@pytest.fixture
async def bus(world: LocalAgent) -> AsyncIterator[HttpsBus]:
    handle = partial(world.dispatcher.handle, limit=None)
    async with on_https(handle, world.paths.blobs) as one:
        yield one


@pytest.fixture
def cli(bus: HttpsBus) -> AgentClient:
    return AgentClient(bus.port)


WRONG = (
    "",
    basic(password="wrong"),
    basic(user="other"),
    basic().lower(),
    basic() + "x",
    "Bearer x",
    "Basic",
    "Basic ä",
)


@pytest.mark.attack("a neighbour calls the create-env endpoint without the password")
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/agent"), ("GET", "/agent"), ("PUT", "/blobs/a/b"), ("GET", "/blobs/")]
)
async def test_t9_request_without_the_password_gets_401(
    cli: AgentClient, bus: HttpsBus, method: str, path: str
) -> None:
    for denied, auth in enumerate(WRONG, 1):
        answer = await cli.send(method, path, auth=auth)

        assert (answer.status, answer.body, bus.stats.denied) == (401, b"", denied), auth
        assert answer.headers["www-authenticate"] == 'Basic realm=""'


async def test_t9_reply_has_status_200_and_is_text(cli: AgentClient) -> None:
    answer = await cli.send("POST", "/agent", b'{"method":"ping","arguments":[],"reply_to":"x"}')

    assert (answer.status, answer.body) == (200, b'{"value":"pong"}')
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("body", [b"null", b"{}"])
async def test_t9_exception_reply_has_status_200(cli: AgentClient, body: bytes) -> None:
    answer = await cli.send("POST", "/agent", body)

    assert answer.status == 200
    assert json.loads(answer.body) == {"exception": {"message": "unknown message "}}


DEEP = b'{"method":"ping","reply_to":"r","arguments":[' + b"[" * 900 + b"]" * 900 + b"]}"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"nonsense", b"{}x", b'{"protocol":"3"}', b'{"reply_to":1}', b"\xff", pytest.param(DEEP, id="deep")],
)
async def test_t9_invalid_request_gets_500(cli: AgentClient, body: bytes) -> None:
    answer = await cli.send("POST", "/agent", body)

    assert (answer.status, answer.body) == (500, b"")
    assert await cli.value("ping") == "pong"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/agent"), ("PUT", "/agent"), ("HEAD", "/blobs/a/b"), ("DELETE", "/blobs/a/b"), ("POST", "/blobs/a/b")],
)
async def test_t9_unsupported_http_methods_get_404(cli: AgentClient, method: str, path: str) -> None:
    answer = await cli.send(method, path)

    assert (answer.status, answer.body) == (404, b"")


@pytest.mark.parametrize("path", ["/", "/agent/", "/agents", "/blob", "/x?y=/agent"])
async def test_t9_unknown_paths_get_404_even_without_a_password(cli: AgentClient, path: str) -> None:
    answer = await cli.send("GET", path, auth="")

    assert (answer.status, answer.body) == (404, b"404 page not found\n")


async def test_t9_blobs_path_without_a_slash_is_redirected(cli: AgentClient) -> None:
    answer = await cli.send("GET", "/blobs", auth="")

    assert (answer.status, answer.headers["location"]) == (307, "/blobs/")


async def test_t9_blob_is_stored_under_the_last_part_of_its_path(cli: AgentClient, world: LocalAgent) -> None:
    content = bytes(range(256)) * 4096

    assert (await cli.send("PUT", "/blobs/ab/cd/my-blob", content)).status == 201

    stored = world.paths.blobs / "my-blob"
    assert stored.read_bytes() == content
    assert stored.stat().st_mode & 0o777 == 0o640
    answer = await cli.send("GET", "/blobs/other/my-blob")
    assert (answer.status, answer.body) == (200, content)
    assert answer.headers["content-type"] == "application/octet-stream"


async def test_t9_existing_blob_is_replaced(cli: AgentClient) -> None:
    await cli.put_blob("one", b"long and old")

    for content in (b"new", b"n", b""):
        assert (await cli.put_blob("one", content)).status == 201

        assert (await cli.get_blob("one")).body == content


async def test_t9_missing_blob_gets_404(cli: AgentClient) -> None:
    answer = await cli.get_blob("absent")

    assert (answer.status, answer.body) == (404, b"")


@pytest.mark.attack("a request passes a path or an option as the name of a blob, a blobstore provider or an agent")
@pytest.mark.parametrize("blob_id", ["", "..", ".hidden", "-c", "%2e%2e", "a%2F..", "a%00b", "x" * 256, "tmp"])
async def test_t9_blob_id_that_is_not_a_plain_name_is_rejected(
    cli: AgentClient, world: LocalAgent, blob_id: str
) -> None:
    before = sorted(world.paths.data.rglob("*"))

    put = await cli.send("PUT", f"/blobs/aa/{blob_id}", b"x")
    got = await cli.send("GET", f"/blobs/aa/{blob_id}")

    assert put.status == 500
    assert put.body.startswith(b"cannot store the blob: ")
    assert (got.status, got.body) == (500, b"")
    assert sorted(world.paths.data.rglob("*")) == before
    held = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert [path for path in held if path.startswith(str(world.paths.blobs))] == []


@pytest.mark.attack("a request passes a path or an option as the name of a blob, a blobstore provider or an agent")
async def test_t9_symlink_is_not_served_as_a_blob_and_an_upload_replaces_it(
    cli: AgentClient, world: LocalAgent
) -> None:
    (world.paths.blobs / "link").symlink_to("/etc/passwd")

    assert (await cli.get_blob("link")).status == 500
    assert (await cli.put_blob("link", b"x")).status == 201

    assert not (world.paths.blobs / "link").is_symlink()


@pytest.mark.parametrize("suite", ["ECDHE-RSA-AES256-GCM-SHA384", "ECDHE-RSA-AES128-GCM-SHA256"])
async def test_t9_tls_1_2_supports_two_cipher_suites(bus: HttpsBus, suite: str) -> None:
    context = trusting(authority().ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(suite)

    assert await AgentClient(bus.port, context).value("ping") == "pong"


@pytest.mark.parametrize("suite", ["ECDHE-RSA-AES128-SHA", "AES256-GCM-SHA384", "ECDHE-RSA-CHACHA20-POLY1305"])
async def test_t9_tls_1_2_rejects_unsupported_cipher_suites(bus: HttpsBus, suite: str) -> None:
    context = trusting(authority().ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(suite)

    with pytest.raises((ssl.SSLError, ConnectionError)):
        await AgentClient(bus.port, context).value("ping")


async def test_t9_tls_1_3_and_http_1_1_are_negotiated(bus: HttpsBus) -> None:
    context = trusting(authority().ca)
    context.set_alpn_protocols(["h2", "http/1.1"])

    async with AgentClient(bus.port, context).connected() as (_, writer):
        talk: ssl.SSLObject = writer.get_extra_info("ssl_object")
        assert (talk.version(), talk.selected_alpn_protocol()) == ("TLSv1.3", "http/1.1")


async def test_t10_missing_protocol_counts_as_protocol_0(cli: AgentClient) -> None:
    assert await cli.value("list_disk") == []
    assert await cli.run("stop") == "stopped"


async def test_t10_https_bus_sends_no_health_monitor_messages(bus: HttpsBus) -> None:
    await bus.publish("hm.agent.heartbeat.x", b"{}")

    assert bus.stats.sent == 0


async def test_https_reply_may_be_longer_than_a_nats_reply(cli: AgentClient) -> None:
    name = "x" * (2 * 1024 * 1024)

    reply = await cli.call(name)

    assert reply == {"exception": {"message": f"unknown message {name}"}}
