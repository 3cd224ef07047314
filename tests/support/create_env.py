"""Runs the agent's HTTPS server, and imitates the client that the bosh CLI uses during ``create-env``.

Requests, statuses and polling follow cloudfoundry/bosh-agent ``agentclient/http`` and bosh-davcli ``client/client.go``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from agent_shim.core.settings import Mbus
from agent_shim.demo.pki import Authority, Pair
from agent_shim.edges.bus import Handle
from agent_shim.edges.bus.https import CallerLimits, HttpsBus

USER = "mbus"
PASSWORD = "p/ss:w%rd"
IN_URL = "p%2Fss%3Aw%25rd"


@cache
def authority() -> Authority:
    """Return a CA with an RSA key, because the TLS 1.2 cipher suites require RSA."""
    return Authority("bosh", bits=2048)


@cache
def pair() -> Pair:
    return authority().server("agent")


def mbus(port: int = 0, **changes: Any) -> Mbus:
    """Return the mbus settings, including address and certificate, that create-env gives to an agent. ``changes``
    replace individual members.
    """
    good = {"certificate": pair().certificate, "private_key": pair().private_key, "ca": ""}
    return Mbus(**{"urls": (f"https://{USER}:{IN_URL}@127.0.0.1:{port}",)} | good | changes)


@asynccontextmanager
async def on_https(handle: Handle, blobs: Path, wanted: Mbus | None = None, **bounds: Any) -> AsyncIterator[HttpsBus]:
    """Run a listening ``HttpsBus`` for the duration of the block."""
    listening = asyncio.Event()
    bus = HttpsBus(wanted or mbus(), handle, blobs, on_connected=listening.set, bounds=CallerLimits(**bounds))
    running = asyncio.create_task(bus.run(), name="bus")
    try:
        async with asyncio.timeout(10):
            await listening.wait()
        yield bus
        assert not running.done(), "nothing ends the bus"
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@dataclass
class HttpAnswer:
    """A response from the agent. Header names are lower-case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def basic(user: str = USER, password: str = PASSWORD) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def trusting(ca: str) -> ssl.SSLContext:
    """Return a TLS context that trusts one CA, as Go clients do.

    ``create_default_context`` is not used here, because since Python 3.13 it rejects BOSH's CA certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca)
    return context


@dataclass
class AgentClient:
    """An HTTPS client for the agent that listens on ``port``."""

    port: int
    context: ssl.SSLContext = field(default_factory=lambda: trusting(authority().ca))

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.context)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def send(
        self, method: str, path: str, body: bytes = b"", auth: str | None = None, **headers: str
    ) -> HttpAnswer:
        """Send one request. ``auth`` is the Authorization header, or "" to send none."""
        auth = basic() if auth is None else auth
        async with asyncio.timeout(60), self.connected() as (reader, writer):
            writer.write(head(method, path, len(body), auth, **headers) + body)
            return await read_answer(reader, method)

    async def put_blob(self, blob_id: str, content: bytes) -> HttpAnswer:
        """Upload a blob as bosh-davcli does."""
        return await self.send("PUT", dav_path(blob_id), content)

    async def get_blob(self, blob_id: str) -> HttpAnswer:
        return await self.send("GET", dav_path(blob_id))

    async def call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Send one request as the bosh CLI does, without ``protocol`` and with a placeholder for ``reply_to``."""
        body = json.dumps({"method": method, "arguments": arguments, "reply_to": "unused"}).encode()
        answer = await self.send("POST", "/agent", body)
        assert answer.status == 200, answer
        document: dict[str, Any] = json.loads(answer.body)
        return document

    async def value(self, method: str, *arguments: Any) -> Any:
        """Run an action that is answered immediately, and return its value."""
        reply = await self.call(method, *arguments)
        assert "value" in reply, reply
        return reply["value"]

    async def run(self, method: str, *arguments: Any) -> Any:
        """Run an action whose reply must be a task ID. Poll the task and return its result."""
        value = await self.value(method, *arguments)
        assert value["state"] == "running"
        task_id = value["agent_task_id"]
        async with asyncio.timeout(60):
            while isinstance(value, dict) and "agent_task_id" in value:
                value = await self.value("get_task", task_id)
        return value


def dav_path(blob_id: str) -> str:
    """Return a blob's URL path. The directory is named after the first two hex digits of the blob id's SHA-1 hash."""
    return f"/blobs/{hashlib.sha1(blob_id.encode()).hexdigest()[:2]}/{blob_id}"


def head(method: str, path: str, length: int, auth: str, **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: agent", f"Content-Length: {length}"]
    lines += [f"Authorization: {auth}"] if auth else []
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def read_answer(reader: asyncio.StreamReader, method: str = "GET") -> HttpAnswer:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
    length = 0 if method == "HEAD" else int(headers.get("content-length", 0))
    return HttpAnswer(int(first.split(" ")[1]), headers, await reader.readexactly(length))
