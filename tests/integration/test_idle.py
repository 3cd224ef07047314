"""Tests a real, idle agent with five jobs: its imported modules, its memory compared with a bare interpreter, and how
often its event loop wakes up.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Final

import pytest

from agent_shim.host import process
from tests.support.instance import ENVIRONMENT, world
from tests.support.ports import free_address
from tools.bench.idle import scrape

JOBS: Final = 5
LIBRARIES: Final = {"httptools", "msgspec", "nats", "prometheus_client", "psutil"}
"""Third-party modules that the agent is allowed to import."""
ABSENT: Final = {
    *(
        "agent_shim.demo",
        "agent_shim.bulk.copytree",
        "agent_shim.bulk.worker",
        "agent_shim.edges.bus.https",
        "agent_shim.bulk.archive",
    ),
    *("agent_shim.bulk.packing", "agent_shim.host.sandbox", "agent_shim.bulk.transfer"),
    *(
        "agent_shim.supervisor.bpm.config",
        "http.client",
        "http.server",
        "importlib.metadata",
        "multiprocessing",
        "nats.js",
        "sqlite3",
    ),
    "_strptime",
    *("tarfile", "unittest", "urllib.request", "xml", "zipfile"),
}
"""Modules of this package and of the standard library that an idle agent must not import, because only other processes
or rare requests need them.
"""
MEMORY: Final = 2.5
"""The highest allowed memory, as a multiple of a bare interpreter's.

Memory usage rises when the agent imports a library that it does not need while idle.
"""
WAKES: Final = 10
"""Highest allowed number of wake-ups in one window."""
WINDOW_S: Final = 10.0
WINDOWS: Final = 4
"""Number of windows in which wake-ups are counted.

The lowest count is compared with the limit, because heartbeats and delays caused by the machine affect only some of the
windows, whereas polling would affect all of them.
"""

_WATCHED = """
import json, os, selectors, sys, threading
pipe, *argv = sys.argv[1:]
real, wakes = selectors.EpollSelector.select, 0

def select(self, timeout=None):
    global wakes
    found = real(self, timeout)
    wakes += timeout is None or timeout > 0
    return found

def tell():
    while True:
        reader = os.open(pipe, os.O_WRONLY)
        os.write(reader, json.dumps([wakes, sorted(sys.modules)]).encode())
        os.close(reader)
        os.close(os.open(pipe + ".read", os.O_RDONLY))

selectors.EpollSelector.select = select
threading.Thread(target=tell, daemon=True).start()
from agent_shim.cli.main import main
sys.exit(main(argv))
"""
"""A program that runs the daemon with a thread that reports wake-ups and modules whenever the test reads from the
pipe.
"""


async def test_idle_agent_wakes_rarely_and_uses_little_memory_and_few_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENT_SHIM_LOOP_REPORTS", raising=False)  # if set, the agent would import test modules
    pipe, program = tmp_path / "told", tmp_path / "watched.py"
    program.write_text(_WATCHED)
    os.mkfifo(pipe)
    os.mkfifo(f"{pipe}.read")

    def told() -> tuple[int, set[str]]:
        wakes, modules = json.loads(pipe.read_bytes())
        Path(f"{pipe}.read").write_bytes(b"")
        return wakes, set(modules)

    words = [sys.executable, str(program), str(pipe), "run", "-C", "{config}", "-b", "{base}"]
    still = "import asyncio, ssl; asyncio.run(asyncio.sleep(3600))"
    bare = process.spawn([sys.executable, "-c", still], env=ENVIRONMENT)
    try:
        async with world(shlex.join(words)) as w:
            w.http = free_address()
            await w.start_agent()
            await w.run("apply", w.spec(JOBS, 16, 64 * 1024))
            await w.run("start")
            await w.until_running()
            await asyncio.to_thread(scrape, w.http)
            best = sys.maxsize
            for _ in range(WINDOWS):
                before, _ = await asyncio.to_thread(told)
                await asyncio.sleep(WINDOW_S)
                wakes, modules = await asyncio.to_thread(told)
                best = min(best, wakes - before)
                if best <= WAKES:
                    break
            memory = _own(w.pid) / _own(bare.pid)
            await w.run("apply", w.spec(JOBS, 1, 64 * 1024))
            _, modules_after = await asyncio.to_thread(told)
    finally:
        bare.send(signal.SIGKILL)
        await bare.wait()

    # Allow two modules that depend on the environment: Debian's sitecustomize, and typing_extensions, which msgspec
    # imports if it is installed.
    known = {*sys.stdlib_module_names, "agent_shim", "cython_runtime", "sitecustomize", "typing_extensions"}
    libraries = {name.partition(".")[0] for name in modules if not name.startswith("_")} - known
    assert libraries == LIBRARIES
    assert modules & ABSENT == set()
    assert 1 < memory <= MEMORY, memory
    assert 0 < best <= WAKES, best
    assert modules_after & ABSENT == set()


def _own(pid: int) -> int:
    """Return the process's anonymous memory in kB. File-backed pages are left out, because other interpreters share
    them.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
