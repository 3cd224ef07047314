"""Compares the supervisor with monit 5.2.5: when a checked resource changes, both must report the same states and run
the same programs.

``MONIT_525`` is the path of monit 5.2.5, which on stemcells is ``/var/vcap/bosh/bin/monit-actual``. Without this
variable, the tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent_shim.edges import monit_http, monit_text
from agent_shim.host import process
from agent_shim.supervisor import monit_api
from agent_shim.supervisor.supervisor import JobFile
from tests.support.programs.jobs import FAST, JobTree
from tests.support.serving import serving

pytestmark = pytest.mark.root

MONIT = os.environ.get("MONIT_525", "")
CYCLE_S = 1.0
PATIENCE_S = 30.0

needs_monit = pytest.mark.skipif(not MONIT, reason="no monit 5.2.5: set MONIT_525 to its path")


Bits = dict[str | None, tuple[str | None, ...]]
"""For each service, the values in the XML status from which the Go agent derives the service's state."""


def figures(document: str) -> Bits:
    root = ET.fromstring(document)  # noqa: S314 - written by our own programs
    wanted = ("status", "monitor", "type")
    return {each.get("name"): tuple(map(each.findtext, wanted)) for each in root.findall("services/service")}


class Side:
    """One of the two programs, monit or the supervisor, with its own directory of checked files.

    ``words`` returns the state of each service as ``monit summary`` shows it. ``bits`` returns the values in the XML
    status.
    """

    def __init__(self, where: Path, words: Callable[[], dict[str, str]], bits: Callable[[], Bits]) -> None:
        self.where = where
        self.words = words
        self.bits = bits

    def lines(self) -> list[str]:
        log = self.where / "log"
        return log.read_text().replace(str(self.where), "DIR").splitlines() if log.exists() else []


@contextlib.asynccontextmanager
async def both(tmp_path: Path, text: str) -> AsyncIterator[tuple[Side, Side]]:
    """Run monit and a supervisor with the same monit file, in which ``DIR`` is replaced with each program's own
    directory.
    """
    theirs, ours = tmp_path / "monit", tmp_path / "w"
    theirs.mkdir()
    world = JobTree(ours, replace(FAST, cycle=CYCLE_S))
    for where in (theirs, ours):
        (where / "size").write_text("small")
        (where / "mode").write_text("bad old\n")
        (where / "mode").chmod(0o600)
        (where / "sum").write_text("hello")
        (where / "gone").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    control = theirs / "monitrc"
    control.touch(mode=0o600)
    control.write_text(
        f"set daemon {CYCLE_S:g}\nset httpd port {port} and use address 127.0.0.1 allow user:word\n"
        f"set idfile {theirs}/id\nset statefile {theirs}/state\nset pidfile {theirs}/pid\n{named(text, theirs)}"
    )
    running = process.spawn([MONIT, "-I", "-c", str(control)], env={}, stdout=theirs / "out", stderr=theirs / "out")
    latest: dict[str, str] = {}
    bits: Bits = {}

    async def read() -> None:
        while True:
            with contextlib.suppress(OSError, ET.ParseError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /_status2?format=xml HTTP/1.0\r\nAuthorization: Basic dXNlcjp3b3Jk\r\n\r\n")
                bits.update(figures((await reader.read()).partition(b"\r\n\r\n")[2].decode("latin-1")))
                writer.close()
            out = theirs / "summary"
            out.unlink(missing_ok=True)
            await process.spawn([MONIT, "-c", str(control), "summary"], env={}, stdout=out).wait()
            for line in out.read_text().splitlines()[2:]:
                title, words = line[:35].rstrip(), line[36:]
                latest[title.split("'")[1]] = words
            await asyncio.sleep(0.1)

    reading = asyncio.create_task(read())
    try:
        async with world.checking(JobFile("job", "", named(text, ours))) as supervisor:

            def words() -> dict[str, str]:
                described = map(monit_api.describe, supervisor.services())
                return {each["name"]: monit_text.words(each) for each in described}

            def document() -> str:
                shown = {"services": list(map(monit_api.describe, supervisor.services()))}
                return monit_http.document(shown, monit_http.MachineFacts(), version=2)

            yield Side(theirs, latest.copy, bits.copy), Side(ours, words, lambda: figures(document()))
    finally:
        reading.cancel()
        await running.terminate(5)
        world.end()


def named(text: str, where: Path) -> str:
    return text.replace("DIR", str(where))


async def agree(sides: tuple[Side, Side], words: dict[str, str], lines: list[str]) -> None:
    """Wait until monit and the supervisor agree: both report the states ``words`` and equal XML values, and
    their logs contain exactly ``lines``.
    """
    said: list[object] = []
    async with asyncio.timeout(PATIENCE_S):
        try:
            while True:
                said[:] = [(each.words(), each.lines(), each.bits()) for each in sides]
                has_words = all({name: each.words().get(name) for name in words} == words for each in sides)
                theirs, ours = (each.bits() for each in sides)
                if (
                    has_words
                    and all(each.lines() == lines for each in sides)
                    and all(theirs.get(name) == ours.get(name) for name in words)
                ):
                    return
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            raise AssertionError(f"monit: {said[0]}; here: {said[1]}; expected: {words}, {lines}") from None


def run(line: str) -> str:
    return f"exec \"/bin/sh -c 'echo {line} >>DIR/log'\""


@needs_monit
async def test_file_checks_give_the_same_results_as_monit(tmp_path: Path) -> None:
    text = f"""
    check file size with path DIR/size
      if size > 10 b for 2 cycles then {run("$MONIT_EVENT")} else if recovered then {run("$MONIT_EVENT")}
    check file mode with path DIR/mode
      if failed permission 600 then alert
    check file sum with path DIR/sum
      if failed checksum expect 5d41402abc4b2a76b9719d911017c592 then alert
    check directory gone with path DIR/gone
    check fifo other with path DIR/size
    """
    async with both(tmp_path, text) as sides:
        fine = dict.fromkeys(("size", "mode", "sum", "gone"), "accessible")
        await agree(sides, fine | {"other": "Invalid type"}, [])
        for side in sides:
            (side.where / "mode").chmod(0o644)
            (side.where / "sum").write_text("hullo")
            (side.where / "gone").rmdir()
        await agree(sides, {"mode": "Permission failed", "sum": "Checksum failed", "gone": "Does not exist"}, [])
        for side in sides:
            (side.where / "mode").chmod(0o600)
            (side.where / "sum").write_text("hello")
            (side.where / "gone").mkdir()
        await agree(sides, fine, [])


@needs_monit
async def test_change_checks_run_programs_as_monit_does(tmp_path: Path) -> None:
    text = f"""
    check file size with path DIR/size
      if changed timestamp then {run("$MONIT_SERVICE $MONIT_EVENT: $MONIT_DESCRIPTION")}
    check file mode with path DIR/mode
      if match "^bad" then {run("$MONIT_EVENT")}
      ignore match "fine$"
    """
    async with both(tmp_path, text) as sides:
        fine = {"size": "accessible", "mode": "accessible"}
        await agree(sides, fine, [])
        for side in sides:
            # monit notices a change only if the previous change was in an earlier second.
            while int(time.time()) == int((side.where / "size").stat().st_ctime):
                await asyncio.sleep(0.02)
            os.utime(side.where / "size", (1, 1))
        lines = ["size Timestamp changed: timestamp was changed for DIR/size"]
        await agree(sides, {}, lines)
        await agree(sides, fine, lines)
        for side in sides:
            with (side.where / "mode").open("a") as file:
                file.write("bad and fine\ngood\nbad\n")
        lines.append("Content match")
        await agree(sides, {"mode": "Content match"}, lines)
        for side in sides:
            with (side.where / "mode").open("a") as file:
                file.write("good\n")
        await agree(sides, fine, lines)


@needs_monit
async def test_host_and_port_checks_give_the_same_results_as_monit(tmp_path: Path) -> None:
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers[0])

    async with contextlib.AsyncExitStack() as opened:
        port = await opened.enter_async_context(serving(serve))
        silent = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        silent.bind(("127.0.0.1", 0))
        text = f"""
        check host page with address 127.0.0.1
          if failed port {port} protocol http and request "/a b" then alert
        check host content with address 127.0.0.1
          if failed url http://127.0.0.1:{port}/x?y and content = "hel" then alert
        check host other with address 127.0.0.1
          if failed url http://127.0.0.1:{port}/x?y and content != "hel" then alert
        check host datagrams with address 127.0.0.1
          if failed port {silent.getsockname()[1]} type udp then alert
        check host echo with address 127.0.0.1
          if failed icmp type echo count 2 with timeout 2 seconds then alert
        """
        names = ("page", "content", "other", "datagrams", "echo")
        fine = dict.fromkeys(names, "online with all services")
        sides = await opened.enter_async_context(both(tmp_path, text))
        await agree(sides, fine | {"other": "Connection failed"}, [])
        answers[0] = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhallo"
        await agree(sides, fine | {"content": "Connection failed"}, [])
        answers[0] = b"HTTP/1.1 503 Oh\r\n\r\n"
        silent.close()
        failed = dict.fromkeys(names[:4], "Connection failed")
        await agree(sides, failed | {"echo": fine["echo"]}, [])
