"""The commands in docs/broken-example diagnose and fix the fault in that example."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from pathlib import Path

import pytest

from tests.integration.test_standalone import StandaloneTree
from tests.support.waiting import TIMEOUT_S

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "docs/broken-example"


async def output_with(place: StandaloneTree, wanted: str, *words: str) -> str:
    """Run a command repeatedly until its output contains ``wanted``. Return that output."""
    said = ""
    async with asyncio.timeout(60):
        while wanted not in said:
            _, said = await place.ask(*words)
            await asyncio.sleep(0.2)
    return said


async def test_broken_example_is_diagnosed_and_fixed_as_documented(tmp_path: Path) -> None:
    place = StandaloneTree(tmp_path)
    shutil.copytree(EXAMPLE, place.rendered)
    for path in place.rendered.rglob("*"):
        if path.is_file():
            path.write_text(path.read_text().replace("/tmp/broken", str(tmp_path)))
    place.start()
    try:
        status = await output_with(place, "exit 1", "status")
        assert "the process exited unexpectedly: exit 1" in status
        assert (await place.ask("probe", "ready"))[0] == 1
        said = await output_with(place, "cannot serve", "logs", "web", "-n", "1")
        assert f"web/web.stdout.log | cannot serve: no port is configured ({tmp_path}/port)" in said

        with socket.create_server(("127.0.0.1", 0)) as once:
            port = once.getsockname()[1]
        (tmp_path / "port").write_text(f"{port}\n")
        assert await place.ask("restart", "web", "--wait") == (0, "")
        await output_with(place, "jobs are running", "probe", "ready")
        async with asyncio.timeout(TIMEOUT_S):
            while b"HTTP/1.0 200" not in await asyncio.to_thread(get_page, port):
                await asyncio.sleep(0.2)
        assert await place.ask("drain") == (0, "all jobs stopped in order")
    finally:
        await place.ask("drain", "--timeout", "5")
        await place.end()


def get_page(port: int) -> bytes:
    """Return the job's page, or an empty value if nothing listens on the port."""
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return client.recv(4096)
    except ConnectionError:
        return b""


def test_broken_example_page_names_the_configured_address_and_directory() -> None:
    config = json.loads((EXAMPLE / "agent.json").read_text())
    page = (EXAMPLE / "README.md").read_text()

    assert config["AgentShim"]["http"] in page
    assert config["AgentShim"]["spec"] in page
