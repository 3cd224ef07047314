"""Notifications to systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_shim.host import sd_notify
from agent_shim.host.sd_notify import Notifier


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def heard(systemd: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(systemd.recv(100).decode())
        except BlockingIOError:
            return found


def test_it_hears_that_we_are_ready_and_that_we_go(systemd: socket.socket) -> None:
    notifier = Notifier(systemd.getsockname())
    notifier.ready()
    notifier.stopping()

    assert heard(systemd) == ["READY=1", "STOPPING=1"]


def test_a_beat_is_told_and_is_due_thrice_in_the_patience(systemd: socket.socket) -> None:
    notifier = Notifier(systemd.getsockname(), 30.0)
    notifier.beat()

    assert notifier.period == 10.0
    assert heard(systemd) == ["WATCHDOG=1"]


def test_without_a_watchdog_there_are_no_beats(systemd: socket.socket) -> None:
    notifier = Notifier(systemd.getsockname())
    notifier.beat()

    assert notifier.period == 0
    assert heard(systemd) == []


def test_an_abstract_name_is_understood() -> None:
    name = f"agent-shim@test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(5)
        Notifier(f"@{name}").ready()

        assert listener.recv(100) == b"READY=1"


def test_nobody_listens(tmp_path: Path) -> None:
    Notifier().ready()
    Notifier(str(tmp_path / "none")).ready()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, Notifier()),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "30000000"}, Notifier("/run/n", 30.0)),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "5", "WATCHDOG_PID": str(os.getpid())}, Notifier("/run/n", 5e-6)),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"}, Notifier("/run/n")),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "soon"}, Notifier("/run/n")),
    ],
)
def test_variables_are_taken_out_of_the_environment(given: dict[str, str], wanted: Notifier) -> None:
    environ = {"PATH": "/bin", **given}

    assert sd_notify.from_environment(environ) == wanted
    assert environ == {"PATH": "/bin"}


def test_notifying_a_systemd_that_does_not_read_does_not_block(
    systemd: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    """The watchdog's thread beats, and must end a held process."""
    notifier = Notifier(systemd.getsockname())
    for _ in range(10_000):
        if caplog.records:
            break
        notifier.ready()

    assert "cannot notify systemd of READY=1: Resource temporarily unavailable" in caplog.text
    assert set(heard(systemd)) == {"READY=1"}
