"""Tests that ``./dev mutate`` runs mutants as root, but confines them so that they cannot damage this machine."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.source import ROOT
from tools.chaos import confined, mutate

pytestmark = pytest.mark.root

HARM = """
import os, signal, socket, sys
from pathlib import Path
from agent_shim.host import clock

def tried(change):
    try:
        change()
    except OSError:
        return False
    return True

def test_harm():
    harm = {{
        "etc": lambda: Path("{etc}").write_text("x"),
        "code": lambda: Path("{code}").write_text("x"),
        "device": lambda: os.mknod("{device}", 0o20600, os.makedev(1, 3)),
        "kernel": lambda: Path("/proc/sys/kernel/hostname").write_text("of-a-mutant"),
        "process": lambda: os.kill({pid}, signal.SIGKILL),
        "connection": lambda: socket.create_connection(("127.0.0.1", {port}), timeout=5).close(),
    }}
    Path("{tmp}").write_text("x")
    assert [name for name, change in harm.items() if tried(change)] == []
    assert clock.boot_ticks() is not None
"""
"""A test that tries to damage the machine. It passes if all attempts failed and ``boot_ticks`` was not mutated."""


class Bystanders:
    """The parts of this machine that a mutant must not be able to change or reach: files, devices, a process and a
    port.
    """

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.process = subprocess.Popen(["sleep", "1000"])
        name = f"of-a-mutant-{os.getpid()}"
        self.files = [Path("/etc") / name, Path("/dev") / name, Path("/tmp") / name, ROOT / name]

    def harm(self) -> str:
        """Return the source of a test that tries to change or reach each bystander."""
        etc, device, tmp, code = self.files
        port = self.listener.getsockname()[1]
        return HARM.format(etc=etc, device=device, tmp=tmp, code=code, pid=self.process.pid, port=port)

    def are_unharmed(self) -> bool:
        """Return True if none of the files was created. Fail if the process or the port was reached."""
        with pytest.raises(BlockingIOError):
            self.listener.accept()
        assert self.process.poll() is None
        return not any(path.exists() for path in self.files)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.close()
        for path in self.files:
            path.unlink(missing_ok=True)


@pytest.fixture
def bystanders() -> Iterator[Bystanders]:
    found = Bystanders()
    yield found
    found.end()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary directory for results instead of the checkout."""
    monkeypatch.setattr(mutate, "STORE", tmp_path)
    return tmp_path


@pytest.fixture
def mutants() -> list[mutate.Mutant]:
    """Return two mutants. The test in ``HARM`` fails with the first and passes with the second."""
    path = "agent_shim/host/clock.py"
    found = mutate.mutants(path, (ROOT / path).read_text())
    chosen = {(one.before.partition("(")[0], one.kind): one for one in found}
    return [chosen["int", "returns None"], chosen["0", "number"]]


def test_forked_mutant_leaves_the_machine_unchanged(
    store: Path, bystanders: Bystanders, mutants: list[mutate.Mutant]
) -> None:
    scratch = store / "tmp-harm-0"
    scratch.mkdir()
    (scratch / "test_harm.py").write_text(bystanders.harm())
    stage = mutate.Stage("harm", (str(scratch / "test_harm.py"),), 10.0)
    (store / "harm").mkdir()
    (store / "harm" / "durations.json").write_text('{"test_harm.py::test_harm": 0.1}')
    results: mutate.Results = {}

    tasks = [(one, ["test_harm.py::test_harm"]) for one in mutants]
    mutate.try_in_forks(tasks, results, stage, 1, float("inf"))

    assert [results[one.key]["harm"]["outcome"] for one in mutants] == ["noticed", "survived"]
    assert bystanders.are_unharmed()


def test_mutation_coverage_includes_lines_run_by_child_processes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    stage = mutate.Stage("imports", ("tests/integration/test_lean_imports.py",), float("inf"), is_forked=False)

    mutate.measure(ROOT, stage, 1)

    [test, *_] = mutate.reaching(stage)["agent_shim/bulk/transfer.py"][1]
    assert test.endswith("::test_ca_certificates_are_loaded_at_first_use[agent_shim.bulk.transfer]")


@pytest.mark.parametrize("end", [subprocess.Popen.terminate, subprocess.Popen.kill])
def test_mutation_run_kills_every_process_that_it_started(
    end: Callable[[subprocess.Popen[bytes]], None], tmp_path: Path
) -> None:
    command = confined.command(
        tmp_path, ["sh", "-c", 'setsid sleep 1000 & echo $! >"$1/pid"; echo up; wait', "sh", str(tmp_path)]
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"up\n"
        end(running)
        assert running.stdout.read() == b""  # No process has the pipe open any more.
    assert int((tmp_path / "pid").read_text()) > 1
