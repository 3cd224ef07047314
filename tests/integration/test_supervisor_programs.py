"""How programs of services are run, and what is kept of their output."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agent_shim.errors import HostError
from agent_shim.supervisor.plan import Program
from agent_shim.supervisor.programs import LAST_WORDS, MAX_OUTPUT, Bucket, Programs


async def test_output_is_kept_and_its_last_line_told(tmp_path: Path) -> None:
    """One file for each service, for root alone."""
    programs = Programs(tmp_path, tmp_path / "output")
    program = await programs.run("a/b", Program(("/bin/sh", "-c", "echo one; echo two >&2; echo")), "Started")
    await program.wait()

    assert (tmp_path / "output/a_b.log").read_text() == "one\ntwo\n\n"
    assert (tmp_path / "output").stat().st_mode & 0o777 == 0o700
    assert programs.last_words("a/b") == "two"
    assert programs.last_words("other") == ""


async def test_place_that_takes_no_output_stops_no_job(tmp_path: Path) -> None:
    """Its programs print into nothing then."""
    (tmp_path / "output").write_text("no directory")
    programs = Programs(tmp_path, tmp_path / "output")
    program = await programs.run("web", Program(("/bin/sh", "-c", "echo one")), "Started")

    assert await program.wait() == 0
    with pytest.raises(HostError, match="cannot run /no/such"):
        await programs.run("web", Program(("/no/such",)), "Started")


def test_output_that_grows_is_cut(tmp_path: Path) -> None:
    """The end is kept; who appends to the file goes on doing so."""
    programs = Programs(tmp_path, tmp_path)
    path = tmp_path / "web.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * MAX_OUTPUT + b"\nlast\n")
        programs.trim()
        writer.write(b"next\n")

    assert path.stat().st_size <= MAX_OUTPUT // 2 + 5
    assert path.read_bytes().endswith(b"x\nlast\nnext\n")
    assert programs.last_words("web") == "next"


def test_last_words_are_few(tmp_path: Path) -> None:
    """A line without end fits an alert."""
    (tmp_path / "web.log").write_bytes(b"y" * 10 * LAST_WORDS)

    assert len(Programs(tmp_path, tmp_path).last_words("web")) == LAST_WORDS


async def test_bucket_lets_a_burst_pass_and_then_one_after_the_other() -> None:
    """500 restarts at once are no storm, a thousand a second are."""
    bucket = Bucket(10, 50)
    begun_at = time.monotonic()
    async with asyncio.timeout(30):
        await asyncio.gather(*(bucket.take() for _ in range(10)))
        await asyncio.gather(*(bucket.take() for _ in range(10)))

    assert time.monotonic() - begun_at >= 0.18


async def test_who_gives_up_waiting_takes_no_turn() -> None:
    """Services that are stopped while they wait for a restart make the others wait no longer."""
    bucket = Bucket(1, 1 / 3600)
    await bucket.take()
    waiting = [asyncio.create_task(bucket.take()) for _ in range(100)]
    await asyncio.sleep(0)
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)

    assert -1 < bucket._left < 1
