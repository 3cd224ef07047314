"""Tests notifications to systemd."""

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


def received(systemd: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(systemd.recv(100).decode())
        except BlockingIOError:
            return found


def test_systemd_is_notified_of_start_and_stop(systemd: socket.socket) -> None:
    notifier = Notifier(systemd.getsockname())
    notifier.ready()
    notifier.stopping()

    assert received(systemd) == ["READY=1", "STOPPING=1"]


def test_systemd_watchdog_is_notified_three_times_per_period(systemd: socket.socket) -> None:
    notifier = Notifier(systemd.getsockname(), 30.0)
    notifier.beat()

    assert notifier.period == 10.0
    assert received(systemd) == ["WATCHDOG=1"]


def test_systemd_watchdog_is_not_notified_unless_requested(systemd: socket.socket) -> None:
    notifier = Notifier(systemd.getsockname())
    notifier.beat()

    assert notifier.period == 0
    assert received(systemd) == []


def test_abstract_notify_socket_is_supported() -> None:
    name = f"agent-shim@test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(5)
        Notifier(f"@{name}").ready()

        assert listener.recv(100) == b"READY=1"


def test_missing_notify_socket_is_ignored(tmp_path: Path) -> None:
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
def test_systemd_variables_are_read_and_removed_from_the_environment(given: dict[str, str], wanted: Notifier) -> None:
    environ = {"PATH": "/bin", **given}

    assert sd_notify.from_environment(environ) == wanted
    assert environ == {"PATH": "/bin"}


def test_notifying_an_unresponsive_systemd_does_not_block(
    systemd: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    """The watchdog thread sends the notifications. If it were blocked, it could not end a blocked agent."""
    notifier = Notifier(systemd.getsockname())
    for _ in range(10_000):
        if caplog.records:
            break
        notifier.ready()

    assert "cannot notify systemd of READY=1: Resource temporarily unavailable" in caplog.text
    assert set(received(systemd)) == {"READY=1"}
