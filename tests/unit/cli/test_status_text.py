"""The status table as text."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agent_shim.cli import ansi, status_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m 0s"), (3600, "1h 0m"), (90061, "1d 1h"), (86400 * 400, "400d 0h")],
)
def test_durations_have_at_most_two_parts(seconds: int, text: str) -> None:
    assert status_text.duration(seconds) == text


def shown(**members: Any) -> dict[str, Any]:
    """A status as the socket answers it."""
    process = {
        "name": "web",
        "state": "running",
        "pid": 812,
        "uptime_secs": 3700,
        "mem_kb": 20480,
        "cpu_total": 1.25,
        "restarts": 0,
        "last_exit": "",
        "reason": "",
        "unheeded": [],
    }
    failing = {
        **process,
        "name": "worker",
        "state": "failing",
        "pid": 0,
        "mem_kb": 0,
        "restarts": 3,
        "last_exit": "exit code 1",
        "reason": "the process ended by itself: exit code 1 (no such table)",
        "unheeded": ["restart when it ends (it has no stop program)"],
    }
    return {
        "version": "1.2.3",
        "phase": "running",
        "uptime_secs": 90000,
        "agent_id": "a1",
        "bus": {"connected": True, "error": "", "heartbeat_secs": 12},
        "deployment": "cf",
        "instance": "api/1",
        "job_state": "failing",
        "task": "",
        "task_progress": "",
        "task_secs": 0,
        "disk": "mounted",
        "warnings": [],
        "tasks_waiting": 0,
        "vitals": {
            "mem": {"kb": "524288", "percent": "51"},
            "cpu": {"user": "3.0", "sys": "2.0", "wait": "0.4"},
            "load": ["0.10", "0.20", "0.30"],
            "disk": {"system": {"percent": "40"}, "ephemeral": {"percent": "93"}},
        },
        "bpm": {"level": 2, "obstacle": "mount: Permission denied", "memory": False, "processes": False},
        "processes": [process, failing],
        **members,
    }


@pytest.mark.parametrize(("level", "is_told"), [(1, False), (2, True), (3, True)])
def test_a_temporary_directory_that_is_not_the_jobs_own_is_told(level: int, is_told: bool) -> None:
    found = {"level": level, "obstacle": "", "memory": True, "processes": True}

    assert ("; /tmp is shared by all jobs" in status_text.isolation(found)) is is_told


def test_the_whole_page() -> None:
    assert status_text.render(shown()) == (
        "agent      a1, agent-shim 1.2.3, up 1d 1h\n"
        "bus        connected, last heartbeat 12s ago\n"
        "deployment cf / api/1\n"
        "job state  failing\n"
        "disk       mounted\n"
        "isolation  level 2 for bpm.yml: Landlock rules (mount: Permission denied); memory limits by a watchdog; "
        "/tmp is shared by all jobs\n"
        "machine    memory 51 % (512.0 MiB), cpu 5 %, waiting 0 %, load 0.10 0.20 0.30\n"
        "space      system 40 %, ephemeral 93 %\n"
        "\n"
        "PROCESS  STATE    PID  UPTIME    MEMORY    CPU  RESTARTS  LAST EXIT\n"
        "web      running  812   1h 1m  20.0 MiB  1.2 %         0  -\n"
        "worker   failing    -       -   0.0 MiB  1.2 %         3  exit code 1\n"
        "  the process ended by itself: exit code 1 (no such table)\n"
        "  not acted on: restart when it ends (it has no stop program)"
    )


def test_colours_change_nothing_but_colours() -> None:
    status = shown(warnings=["no interface has the address 10.0.0.9"], task="apply", task_progress="unpacking")
    painted = status_text.render(status, ansi.coloured)

    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == status_text.render(status)
    assert "\x1b[32mrunning" in painted
    assert "\x1b[1;31mfailing" in painted
    assert "\x1b[1;31m93 %" in painted


def test_before_there_are_settings_the_page_says_what_is_waited_for() -> None:
    page = status_text.render(
        shown(
            phase="waiting for settings",
            bus={"connected": False, "error": "waiting for settings", "heartbeat_secs": None},
            vitals={},
            processes=[],
        )
    )

    assert "phase      waiting for settings\n" in page
    assert page.endswith("no processes: nothing is deployed yet")
