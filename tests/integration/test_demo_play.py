"""Tests the demo as a user runs it: what it starts, how it can be stopped, and what it reports when it fails."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_shim.demo import play
from agent_shim.demo.director import Director

pytestmark = pytest.mark.loop_may_be_held


@pytest.fixture
def short() -> Iterator[Path]:
    """Return a directory with a short path, because a socket path can have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="d-") as made:
        yield Path(made)


@contextmanager
def demo(where: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a demo whose directories are created in ``where``."""
    argv = [sys.executable, "-m", "agent_shim", "demo", *words]
    environment = {name: text for name, text in os.environ.items() if name != "AGENT_SHIM_LOOP_REPORTS"} | {
        "TMPDIR": str(where),
        "PYTHONUNBUFFERED": "1",
    }
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as started:
        try:
            yield started
        finally:
            started.send_signal(signal.SIGINT)
            started.wait(60)


def until(started: subprocess.Popen[str], pattern: str) -> str:
    """Read output lines until one of them matches ``pattern``. Return all lines that were read."""
    assert started.stdout is not None
    said = ""
    for line in started.stdout:
        said += line
        if re.search(pattern, line):
            return said
    raise AssertionError(f"the demo ended: {said}")


def processes_of(where: Path) -> list[str]:
    """Return all process command lines that contain the path ``where``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(where) in line:
                found.append(line)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_with_option_keep_can_be_used_until_a_signal_stops_it(short: Path, number: signal.Signals) -> None:
    where = short / "ein Ort für Proben"
    where.mkdir()
    with demo(where, "--keep") as started:
        said = until(started, "Alerts to the Health Monitor follow")
        (place,) = re.findall(r"^  cd (.*)$", said, re.MULTILINE)
        (address,) = re.findall(r"curl (http://127.0.0.1:\d+/)  ", said)

        assert re.search(r"web +running", output(f"cd {place}; ./agent-shim status -b vcap"))
        assert "Process 'web'" in output(f"cd {place}; ./monit -b vcap summary")
        assert urllib.request.urlopen(address, timeout=30).read().startswith(b"hello, visitor")
        assert len(processes_of(where)) >= 5
        started.send_signal(number)
        assert "all processes have ended" in until(started, "have ended")
        assert started.wait(60) == 0

    assert processes_of(where) == []
    assert list(where.iterdir()) == []


def output(line: str) -> str:
    return subprocess.run(line, shell=True, capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S602


def test_ctrl_c_stops_all_demo_processes(short: Path) -> None:
    with demo(short) as started:
        until(started, "the deployed web service answers")
        assert len(processes_of(short)) >= 4
        started.send_signal(signal.SIGINT)
        started.wait(60)

    assert started.returncode == -signal.SIGINT
    assert processes_of(short) == []
    assert list(short.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "waited"), [(("--keep",), "Alerts to the"), ((), "the deployed web service answers")]
)
def test_closing_the_terminal_stops_all_demo_processes(short: Path, words: tuple[str, ...], waited: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TMPDIR"] = str(short)
        os.execv(sys.executable, [sys.executable, "-m", "agent_shim", "demo", *words])
    said = b""
    while waited.encode() not in said:
        said += os.read(terminal, 1 << 16)
    os.close(terminal)
    os.waitpid(pid, 0)

    assert processes_of(short) == []
    assert list(short.iterdir()) == []


def test_failed_demo_names_its_step_and_the_log(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Director.run

    async def broken(director: Director, agent_id: str, method: str, *arguments: object, **more: float) -> object:
        if arguments[:1] == ("post-start",):
            raise TimeoutError
        return await run(director, agent_id, method, *arguments, **more)

    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(short / prefix))
    (short / "agent-shim-demo-").mkdir()
    monkeypatch.setattr(Director, "run", broken)
    with pytest.raises(play.DemoError, match=r'step "post-start": TimeoutError; the log is .*/agent.log'):
        play.main()

    assert processes_of(short) == []
    assert (short / "agent-shim-demo-/agent.log").stat().st_size > 0
