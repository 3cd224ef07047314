"""Tests running programs on a new pseudo-terminal, which replaces the standard streams that are connected to the
operator's terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from agent_shim.host import pseudo_terminal
from tests.support.machine import CODE
from tests.support.waiting import TIMEOUT_S

pytestmark = pytest.mark.root

RUN = """
import json, os, signal, sys, tty
from agent_shim.host import pseudo_terminal
pseudo_terminal.HANG_UP_TIMEOUT_S = 1.0
argv, report = json.loads(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
asked = []
def program(terminal):
    asked.append(terminal)
    return argv, report
if sys.argv[3] == "run, and be ended early":
    set_raw = tty.setraw
    tty.setraw = lambda terminal: (set_raw(terminal), os.kill(os.getpid(), signal.SIGTERM))
if sys.argv[3].startswith("run"):
    code = pseudo_terminal.run(program, os.getpid())
else:
    code = pseudo_terminal.in_terminal(argv)
with open(sys.argv[2] + ".code", "w") as file:
    json.dump([code, asked], file)
"""
"""Runs a program through ``pseudo_terminal``. The program writes its report to descriptor 3."""


class Operator:
    """An operator's terminal, on which tests run shell scripts through ``pseudo_terminal``."""

    def __init__(self, scratch: Path) -> None:
        self.report, self._seen = scratch / "report", b""
        self.report.write_text("")
        self._master, self.terminal = pty.openpty()
        os.set_blocking(self._master, False)
        self.resize(33, 99)
        self.before = termios.tcgetattr(self.terminal)
        self._running: subprocess.Popen[bytes] | None = None

    def call(self, script: str | list[str], streams: tuple[int, ...] = (0, 1, 2), what: str = "run") -> None:
        """Run a script with ``streams`` connected to the terminal and the other standard streams to pipes. Do not wait
        for it.
        """
        argv = ["/bin/sh", "-c", script] if isinstance(script, str) else script
        pipes = {
            name: self.terminal if number in streams else subprocess.PIPE
            for number, name in enumerate(("stdin", "stdout", "stderr"))
        }
        own = [sys.executable, "-c", RUN, json.dumps(argv), str(self.report), what]
        self._running = subprocess.Popen(own, cwd=CODE, start_new_session=True, **pipes)  # type: ignore[call-overload]

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self._running is not None
        return self._running

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def type(self, keys: bytes) -> int:
        """Type bytes and return how many of them the terminal has accepted."""
        return os.write(self._master, keys)

    def hang_up(self) -> None:
        os.close(self.terminal)
        os.close(self._master)
        self._master = self.terminal = -1

    def seen(self) -> bytes:
        """Return everything that the terminal has shown so far."""
        with contextlib.suppress(OSError):  # There is no further output, or the terminal was closed.
            while chunk := os.read(self._master, 65536):
                self._seen += chunk
        return self._seen

    def wait_for_report(self, wanted: str = "") -> str:
        """Wait until the program's report contains ``wanted`` and return it."""
        self.eventually(lambda: wanted in self.report.read_text())
        return self.report.read_text()

    def ended(self) -> tuple[int, list[int | None]]:
        """Wait until the script has exited. Return its exit code and the arguments with which ``pseudo_terminal``
        called ``program``.

        Each argument is the descriptor of the operator's terminal, or None if there was no terminal.
        """
        self.eventually(lambda: self.seen() is not None and self.running.poll() is not None)
        self.seen()
        code, asked = json.loads(self.report.with_suffix(".code").read_text())
        return code, asked

    def eventually(self, fact: Callable[[], Any]) -> Any:
        give_up_at = time.monotonic() + TIMEOUT_S
        while not (found := fact()):
            assert time.monotonic() < give_up_at, (self.seen(), self.report.read_text())
            time.sleep(0.01)
        return found

    def close(self) -> None:
        if self._running is not None:
            self._running.kill()
            for stream in (self._running.stdin, self._running.stdout, self._running.stderr):
                if stream is not None:
                    stream.close()
            self._running.wait()
        for descriptor in {self._master, self.terminal} - {-1}:
            os.close(descriptor)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    made = Operator(tmp_path)
    yield made
    made.close()


WHERE = """
for each in 0 1 2; do
  name=none
  test -t $each && name=$(readlink /proc/$$/fd/$each)
  echo $name >&3
done
echo to stdout
echo to stderr >&2
"""


@pytest.mark.parametrize("streams", [(0, 1, 2), (0, 1), (1, 2), (0, 2), (0,), (1,), (2,)])
def test_only_terminal_streams_are_replaced_by_the_new_terminal(operator: Operator, streams: tuple[int, ...]) -> None:
    operator.call(WHERE, streams)
    code, asked = operator.ended()
    names = operator.wait_for_report().split()

    assert (code, asked) == (0, [streams[0]])
    assert [name != "none" for name in names] == [number in streams for number in (0, 1, 2)]
    assert len({*names} - {"none"}) == 1
    assert os.ttyname(operator.terminal) not in names
    pipes = (operator.running.stdout, operator.running.stderr)
    for number, stream, text in zip((1, 2), pipes, (b"to stdout", b"to stderr"), strict=True):
        assert (text in operator.seen()) is (number in streams)
        assert stream is None or stream.read() == text + b"\n"


def test_program_without_terminal_streams_gets_its_own_session(operator: Operator) -> None:
    """If the program stayed in the operator's session, it could open the operator's terminal as /dev/tty."""
    operator.call('echo $(cut -d " " -f 6 /proc/$$/stat) $$ >&3; cat; exit 7', ())
    out, _ = operator.running.communicate(b"input")

    assert operator.ended() == (7, [None])
    assert out == b"input"
    session, pid = operator.wait_for_report().split()
    assert session == pid


@pytest.mark.parametrize("streams", [(), (0, 1, 2)])
@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143)])
def test_terminal_session_exit_codes_follow_shell_conventions(
    operator: Operator, streams: tuple[int, ...], script: str, code: int
) -> None:
    operator.call(script, streams)

    assert operator.ended()[0] == code


@pytest.mark.parametrize("streams", [(), (0, 1, 2)])
def test_terminal_session_for_a_program_that_cannot_run_is_an_error(
    operator: Operator, streams: tuple[int, ...]
) -> None:
    operator.call(["/nothing"], streams)
    operator.eventually(lambda: operator.seen() is not None and operator.running.poll() is not None)
    said = operator.seen() if streams else operator.running.stderr and operator.running.stderr.read()

    assert said
    assert b"FileNotFoundError: [Errno 2] No such file or directory: '/nothing'" in said
    assert termios.tcgetattr(operator.terminal) == operator.before


def test_program_in_a_terminal_session_ignores_no_signal(operator: Operator) -> None:
    """Python ignores some signals, such as SIGPIPE. The session must restore their default actions before it runs the
    program.
    """
    operator.call("grep SigIgn /proc/self/status >&3")
    operator.ended()
    ignored = int(operator.wait_for_report().split()[1], 16)

    assert [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if ignored & 1 << number - 1] == []


def test_terminal_session_forwards_raw_keys_and_restores_the_modes(operator: Operator) -> None:
    operator.call("echo up >&3; read line; echo got:$line")
    operator.wait_for_report("up")
    operator.eventually(lambda: not termios.tcgetattr(operator.terminal)[3] & (termios.ECHO | termios.ICANON))
    operator.type(b"some x\x7fwords\r")

    assert operator.ended()[0] == 0
    assert b"got:some words\r\n" in operator.seen()
    assert termios.tcgetattr(operator.terminal) == operator.before


def test_terminal_session_leaves_piped_input_to_the_program(operator: Operator) -> None:
    operator.call("read line; echo up >&3; echo got:$line; read line", (1, 2))
    assert operator.running.stdin is not None
    operator.running.stdin.write(b"words\n")
    operator.running.stdin.flush()
    operator.wait_for_report("up")
    assert termios.tcgetattr(operator.terminal) == operator.before
    operator.running.stdin.close()

    assert operator.ended()[0] == 1
    assert b"got:words" in operator.seen()


def test_terminal_session_forwards_the_window_size(operator: Operator) -> None:
    operator.call('stty size >&3; while test "$(stty size)" = "33 99"; do sleep 0.02; done; stty size >&3')
    operator.wait_for_report("33 99\n")
    operator.resize(44, 111)
    operator.running.send_signal(signal.SIGWINCH)

    assert operator.ended()[0] == 0
    assert operator.wait_for_report() == "33 99\n44 111\n"


def catches(pid: int, number: int) -> bool:
    """Return True if a process has installed a handler for a signal. (Python always has one for SIGINT.)"""
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_to_a_terminal_session_hangs_up_the_program(operator: Operator, number: int) -> None:
    operator.call("trap 'echo hung up; exit 5' HUP; echo up >&3; while :; do sleep 0.02; done")
    operator.wait_for_report("up")
    operator.eventually(lambda: catches(operator.running.pid, signal.SIGHUP))
    operator.running.send_signal(number)

    assert operator.ended()[0] == 5
    assert b"hung up\r\n" in operator.seen()
    assert termios.tcgetattr(operator.terminal) == operator.before


def test_stopped_program_in_a_terminal_session_gets_sighup(operator: Operator) -> None:
    operator.call("trap 'exit 5' HUP; echo $$ >&3; kill -STOP $$")
    pid = int(operator.wait_for_report("\n"))
    operator.eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    operator.running.terminate()

    assert operator.ended()[0] == 5


def test_terminal_session_kills_a_program_that_ignores_the_hang_up(operator: Operator) -> None:
    operator.call("trap 'echo last words' HUP; echo up >&3; while :; do sleep 0.02; done")
    operator.wait_for_report("up")
    operator.running.send_signal(signal.SIGTERM)

    assert operator.ended()[0] == 137
    assert b"last words" in operator.seen()


def test_terminal_is_restored_if_a_signal_arrives_before_copying_begins(operator: Operator) -> None:
    operator.call("exec sleep 600", what="run, and be ended early")

    assert operator.ended()[0] == 128 + signal.SIGHUP
    assert termios.tcgetattr(operator.terminal) == operator.before


@pytest.mark.attack("a bpm process types into the operator's terminal, or survives the end of `bpm shell`")
@pytest.mark.parametrize("is_signal", [True, False])
def test_terminal_session_ends_on_hangup_even_if_its_program_reads_no_input(
    operator: Operator, is_signal: bool
) -> None:
    operator.call("trap '' HUP; stty raw -echo; echo up >&3; while :; do sleep 0.02; done")
    operator.wait_for_report("up")
    for _ in range(100):
        with contextlib.suppress(BlockingIOError):
            operator.type(b"x" * 2000)
        time.sleep(0.005)
    if is_signal:
        operator.running.terminate()
    else:
        operator.hang_up()

    assert operator.ended()[0] == 137


def test_keystrokes_beyond_the_terminal_buffer_arrive_later(operator: Operator) -> None:
    operator.call("stty raw -echo; echo up >&3; sleep 1; head -c 200000 | cksum >&3")
    operator.wait_for_report("up")
    keys, left = b"".join(b"%07d\n" % number for number in range(25_000)), 0
    while left < len(keys):
        with contextlib.suppress(BlockingIOError):
            left += operator.type(keys[left : left + 4000])

    assert operator.ended()[0] == 0
    assert operator.wait_for_report("\n").split()[1:] == subprocess.check_output("cksum", input=keys).decode().split()


def test_terminal_session_with_piped_input_translates_line_breaks_once(operator: Operator) -> None:
    operator.call("echo one", streams=(1, 2))

    assert operator.ended()[0] == 0
    assert operator.seen() == b"one\r\n"


def test_children_that_keep_the_terminal_open_do_not_prolong_a_terminal_session(operator: Operator) -> None:
    operator.call("trap '' HUP; (echo $$ >&3; exec sleep 1000) & seq 20000; exit 3")

    assert operator.ended()[0] == 3
    assert operator.seen().split()[-1] == b"20000"
    assert len(operator.seen().split()) == 20000


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 7", 7),
        ("kill -TERM $$", 143),
        ("echo up >&3; exec sleep 1000", 130),
        ("trap '' INT; echo up >&3; while :; do sleep 0.02; done", 130),
    ],
)
def test_ctrl_c_in_a_terminal_session_interrupts_only_the_program(operator: Operator, script: str, code: int) -> None:
    """The caller must survive Ctrl-C so that it can report how the program exited."""
    report = f"exec 3>>{operator.report}; "
    operator.call(report + script, what="in_terminal")
    if code == 130:
        operator.wait_for_report("up")
        os.killpg(operator.running.pid, signal.SIGINT)

    assert operator.ended()[0] == code


@pytest.mark.parametrize("kind", ["file", "other device", "link"])
def test_fake_ptmx_device_is_rejected(tmp_path: Path, kind: str) -> None:
    """A job controls the file system in which the device is opened, and could put another device or a file there."""
    place = tmp_path / "dev/pts/ptmx"
    place.parent.mkdir(parents=True)
    if kind == "file":
        place.write_text("")
    elif kind == "link":
        place.symlink_to("/dev/pts/ptmx")
    else:
        os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 3))

    with pytest.raises(OSError, match="it makes no terminals"):
        pseudo_terminal.open_pair(str(tmp_path))
