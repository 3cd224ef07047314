"""Tests the output of ``agent-shim status``."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agent_shim.cli import ansi, status_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m 0s"), (3600, "1h 0m"), (90061, "1d 1h"), (86400 * 400, "400d 0h")],
)
def test_status_durations_have_at_most_two_units(seconds: int, text: str) -> None:
    assert status_text.duration(seconds) == text


def shown(**members: Any) -> dict[str, Any]:
    """Return a status with ``members``, in the form in which it is sent over the control socket."""
    process = {
        "name": "web",
        "job": "web",
        "state": "running",
        "phase": "running",
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
        "phase": "down",
        "pid": 0,
        "mem_kb": 0,
        "restarts": 3,
        "last_exit": "exit code 1",
        "reason": "the process exited unexpectedly: exit code 1 (no such table)",
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


@pytest.mark.parametrize(("level", "is_mentioned"), [(1, False), (2, True), (3, True)])
def test_status_mentions_a_tmp_directory_that_all_jobs_share(level: int, is_mentioned: bool) -> None:
    found = {"level": level, "obstacle": "", "memory": True, "processes": True}

    assert ("; /tmp is shared by all jobs" in status_text.isolation(found)) is is_mentioned


def test_status_page_is_complete() -> None:
    assert status_text.render(shown()) == (
        "agent      a1, agent-shim 1.2.3, up 1d 1h\n"
        "bus        connected, last heartbeat 12s ago\n"
        "deployment cf / api/1\n"
        "job state  failing\n"
        "disk       mounted\n"
        "isolation  level 2 for bpm.yml: Landlock rules (mount: Permission denied); memory limits enforced by a "
        "watchdog; /tmp is shared by all jobs\n"
        "machine    memory 51 % (512.0 MiB), cpu 5 %, waiting 0 %, load 0.10 0.20 0.30\n"
        "space      system 40 %, ephemeral 93 %\n"
        "\n"
        "PROCESS  STATE    PID  UPTIME    MEMORY    CPU  RESTARTS  LAST EXIT\n"
        "worker   down       -       -         -      -         3  exit code 1\n"
        "  the process exited unexpectedly: exit code 1 (no such table)\n"
        "  not acted on: restart when it ends (it has no stop program)\n"
        "web      running  812   1h 1m  20.0 MiB  1.2 %         0  -"
    )


def test_colours_do_not_change_the_status_text() -> None:
    status = shown(warnings=["no interface has the address 10.0.0.9"], task="apply", task_progress="unpacking")
    painted = status_text.render(status, ansi.coloured)

    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == status_text.render(status)
    assert "\x1b[32mrunning" in painted
    assert "\x1b[1;31mfailing" in painted
    assert "\x1b[1;31mdown" in painted
    assert "\x1b[1;31m93 %" in painted


def test_status_shows_that_the_agent_is_waiting_for_settings() -> None:
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


def many(count: int) -> dict[str, Any]:
    """Return a status with ``count`` processes, of which only the last is down."""
    web, worker = shown()["processes"]
    return shown(processes=[*({**web, "name": f"web-{number}"} for number in range(count - 1)), worker])


def test_status_watch_with_two_hundred_jobs_fits_the_screen_and_shows_the_failing_job() -> None:
    lines = status_text.render(many(200), columns=80, lines=24).splitlines()

    assert len(lines) == 24
    assert any(line.startswith("worker") for line in lines)
    assert lines[-1].startswith("… ")
    assert all(ansi.width(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("state", "phase", "word"),
    [("unknown", "stopped", "stopped"), ("unknown", "unmonitored", "unmonitored"), ("failing", "running", "failing")],
)
def test_status_shows_the_phase_of_a_process_whose_state_is_unknown(state: str, phase: str, word: str) -> None:
    assert status_text.shown_state({"state": state, "phase": phase}) == word


def test_status_columns_align_with_wide_characters() -> None:
    status = shown()
    status["processes"][0]["name"] = "ウェブ"
    table = status_text.render(status).splitlines()[-5:]

    starts = {
        ansi.width(line[: line.index(word)])
        for line, word in zip([table[0], table[1], table[4]], ["STATE", "down", "running"], strict=True)
    }
    assert len(starts) == 1


@pytest.mark.parametrize("columns", [1, 5, 10, 79])
def test_truncated_status_line_fits_and_resets_its_colours(columns: int) -> None:
    line = ansi.coloured("ウェブ is down", "wrong") + " and more" * 20

    clipped = ansi.clipped(line, columns)
    assert ansi.width(re.sub(r"\x1b\[[0-9;]*m", "", clipped)) <= columns
    assert clipped.endswith(("\x1b[0m", "…"))
    assert ansi.clipped("short", 5) == "short"


def test_status_details_omit_empty_values() -> None:
    more = {
        "faults": [],
        "children": 2,
        "threads": 5,
        "mem_percent": 1.5,
        "cpu_seconds": 12.0,
        "groups": ["vcap"],
        "mode": "active",
        "started_at": 1764151200.0,
        "retry_secs": None,
    }
    web, worker = ({**process, **more} for process in shown()["processes"])

    assert status_text.details(web) == (
        "● web of job web\n"
        "      state  running since 2025-11-26 10:00:00 UTC, 1h 1m ago\n"
        "        pid  812, 2 descendants, 5 threads\n"
        "     memory  20.0 MiB (1.5 %)\n"
        "        cpu  1.2 %, 12.0 s in total\n"
        "   restarts  0\n"
        "  last exit  -\n"
        "     groups  vcap\n"
        "       logs  agent-shim logs web"
    )
    assert "     reason  the process exited unexpectedly" in status_text.details(worker)
    assert "pid" not in status_text.details(worker)


def test_status_details_show_the_next_start_and_end_with_the_log() -> None:
    worker = shown()["processes"][1] | dict.fromkeys(("faults", "groups"), ()) | {"mode": "active", "retry_secs": 8.2}
    lines = status_text.details(worker, log=["worker.stderr.log | no such table"]).splitlines()

    assert lines[2] == " next start  in 8s"
    assert lines[-2:] == ["", "worker.stderr.log | no such table"]


def test_status_details_show_the_last_events() -> None:
    events = [
        {"at": 1764151200.0, "count": 1, "text": "start asked, now starting"},
        {"at": 1764151260.0, "count": 3, "text": "Connection failed, alert: no answer"},
    ]
    more = dict.fromkeys(("faults", "groups"), ()) | {"mode": "active", "retry_secs": None, "events": events}

    assert status_text.details(shown()["processes"][1] | more).splitlines()[-4:] == [
        "",
        "events since the agent started",
        "  2025-11-26 10:00:00 UTC  start asked, now starting",
        "  2025-11-26 10:01:00 UTC  Connection failed, alert: no answer (3 times)",
    ]


def test_status_reasons_and_warnings_are_wrapped() -> None:
    status = shown() | {
        "warnings": ["the jobs cannot be started: pre-start: 1 of 1 pre-start scripts failed. web: x"],
        "firewall": {"why": f"needs root and the base directory /var/vcap {'/long' * 20}"},
    }
    narrow = status_text.render(status, columns=60).splitlines()
    wide = status_text.render(status).splitlines()

    assert [line for line in narrow if len(line) > 60] == []
    for text in (
        "the process exited unexpectedly: exit code 1 (no such table)",
        status["warnings"][0],
        status["firewall"]["why"],
    ):
        assert text.replace(" ", "") in "".join(line.replace(" ", "") for line in narrow)
        assert any(text in line for line in wide)
