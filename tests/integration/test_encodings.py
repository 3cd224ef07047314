"""Tests commands whose output contains characters that the locale's encoding cannot represent."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.test_standalone import StandaloneTree
from tests.support import jobs
from tests.support.terminals import on_terminal
from tests.support.waiting import until

LATIN: Mapping[str, str] = {"PYTHONIOENCODING": "iso-8859-1"}
ASCII: Mapping[str, str] = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

TEXT = "größe 漢字 😀 \udcff"
END = "--end-of-command--"
MAIN = """
import os, sys, traceback
from agent_shim.cli import commands, monit
from agent_shim.cli.main import main

_, end, *words = sys.argv
while words:
    length = words.index(end)
    if (pid := os.fork()) == 0:
        sys.argv = words[:length]
        try:
            code = main()
        except SystemExit as exc:
            code = exc.code
        except Exception:
            traceback.print_exc()
            code = 255
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(1, f"{end}{code}\\n".encode())
    del words[: length + 1]
"""
"""A program that runs commands in child processes, because starting an interpreter for each would take much longer. Its
arguments are a separator and the words of the commands, each followed by the separator. After the output of a command,
it prints the separator and the exit code.
"""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[StandaloneTree]:
    """Run an agent with two jobs whose output contains ``TEXT``.

    The text is in one job's log. The other job's start program prints it and fails.
    """
    made = StandaloneTree(tmp_path)
    made.write_files("jobs/web", jobs.sleeper(made.paths, "web"))
    said = os.fsencode(TEXT).decode("latin-1")
    broken = {
        "monit": f"check process broken with pidfile {made.paths.run}/broken.pid\n"
        f'  start program "{made.paths.jobs}/broken/bin/ctl"\n  group vcap\n',
        "bin/ctl": f"#!/usr/bin/env python3\nimport os, sys\nos.write(2, {said!r}.encode('latin-1'))\nsys.exit(1)\n",
    }
    made.write_files("jobs/broken", broken)
    made.start()
    try:
        await until(made.paths.control_socket.exists)
        log = made.paths.log / "web"
        log.mkdir(parents=True, exist_ok=True)
        (log / "web.log").write_bytes(os.fsencode(f"{TEXT}\n"))
        (tmp_path / "good.monit").write_text(
            "check process größe with pidfile /größe.pid\n group vcap\n", encoding="utf-8"
        )
        (tmp_path / "wrong.monit").write_text("check process x with pidfile /漢.pid starrt\n", encoding="utf-8")
        yield made
    finally:
        await made.ask("drain", "--timeout", "5")
        await made.end()


def commands(place: StandaloneTree) -> list[tuple[int, tuple[str, ...]]]:
    """Return the command lines to test, each with its exit code."""
    base = ("-b", str(place.paths.base))
    return [
        (0, ("agent-shim", "status", *base)),
        (1, ("agent-shim", "status", "broken", *base)),
        (0, ("agent-shim", "status", "--json", *base)),
        (0, ("agent-shim", "logs", *base)),
        (78, ("agent-shim", "check", f"{place.scratch}/good.monit", f"{place.scratch}/wrong.monit")),
        (66, ("agent-shim", "check", "--json", f"{place.scratch}/no-größe\udcff.monit")),
        (2, ("agent-shim", "call", "größe 漢\udcff", *base)),
        (69, ("agent-shim", "start", "größe漢\udcff", *base)),
        (2, ("agent-shim", "nonsense-größe漢\udcff")),
        (2, ("bosh-agent", "-größe漢\udcff")),
        (0, ("bpm", "--help")),
        (1, ("bpm", "logs", "größe漢\udcff")),
        (0, ("monit", *base, "summary")),
        (0, ("monit", *base, "status")),
        (0, ("monit", "-t", f"{place.scratch}/good.monit")),
        (1, ("monit", *base, "start", "größe漢\udcff")),
    ]


def run(
    lines: Sequence[tuple[str, ...]], locale: Mapping[str, str], *, on_pty: bool = False
) -> list[tuple[int, bytes]]:
    """Run commands. Return the exit code and the combined output of each."""
    argv = [sys.executable, "-c", MAIN, END, *(word for words in lines for word in (*words, END))]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **locale}
    if on_pty:
        said = on_terminal(["env", "-i", *(f"{key}={value}" for key, value in environment.items()), *argv])
    else:
        said = subprocess.run(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
        ).stdout
    first, *others = said.split(END.encode())
    codes, pages = zip(*(part.split(b"\n", 1) for part in others), strict=True)
    return list(zip(map(int, codes), (first, *pages[:-1]), strict=True))


async def test_commands_escape_characters_that_the_locale_cannot_encode(place: StandaloneTree) -> None:
    status = ("agent-shim", "status", "-b", str(place.paths.base))
    await until(lambda: b"start program exited" in run([status], LATIN)[0][1])

    for locale, on_pty in ((LATIN, False), (LATIN, True), (ASCII, False)):
        await _check_commands(place, locale, on_pty=on_pty)


async def _check_commands(place: StandaloneTree, locale: Mapping[str, str], *, on_pty: bool) -> None:
    pages = {}
    tested = commands(place)
    results = await asyncio.to_thread(run, [words for _, words in tested], locale, on_pty=on_pty)
    for (wanted, words), (code, said) in zip(tested, results, strict=True):
        pages[words[:3]] = page = said.decode("latin-1")
        assert (words, code) == (words, wanted), page
        assert "Traceback" not in page, page
        assert said, words

    details = pages["agent-shim", "status", "broken"]
    assert r"\u6f22" in details
    assert details.lstrip("\x1b[0123456789;m").startswith("*")
    assert json.loads(pages["agent-shim", "status", "--json"])["processes"]
    assert ("\\u6f22" if on_pty else os.fsencode(TEXT).decode("latin-1")) in pages["agent-shim", "logs", "-b"]
