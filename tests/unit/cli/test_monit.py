"""Tests the arguments, the output and the exit codes of the ``monit`` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agent_shim.cli import monit
from agent_shim.core.errors import NoAgentError
from agent_shim.edges import control_client, monit_text

MACHINE = monit_text.HostFacts("vm-1", (0.5, 1.25, 2.0), "Sat Aug  1 10:00:00 2026")


def service(name: str = "web", **members: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "process",
        "phase": "running",
        "state": "running",
        "pid": 41,
        "parent": 1,
        "uptime_secs": 3725,
        "children": 2,
        "own_mem_kb": 1000,
        "mem_kb": 3000,
        "own_mem_percent": 0.04,
        "mem_percent": 0.16,
        "own_cpu": 1.0,
        "cpu_total": 2.5,
        "reason": "",
        "unheeded": [],
        "groups": ["vcap"],
        "mode": "active",
        "faults": [],
        "responses": [],
        **members,
    }


def shown(*services: dict[str, Any]) -> dict[str, Any]:
    return {"pid": 7, "uptime_secs": 90061, "services": list(services)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the agent with one that accepts every request. Return the list of requests that it receives."""
    requests: list[dict[str, Any]] = []

    def ask(path: Path, request: dict[str, Any]) -> dict[str, Any]:
        requests.append(request | {"socket": path})
        return shown(service())

    monkeypatch.setattr(control_client, "ask", ask)
    monkeypatch.setattr(sys, "argv", ["/var/vcap/bosh/bin/monit"])
    return requests


def test_monit_summary_pads_names_to_35_columns() -> None:
    text = monit_text.summary(
        shown(service(), service("a-name-that-is-longer-than-the-column-is"), service("f", kind="file")), MACHINE
    )

    assert text.split("\n") == [
        "The Monit daemon 5.2.5 uptime: 1d 1h 1m ",
        "",
        "Process 'web'                       running",
        "Process 'a-name-that-is-longer-than-the-column-is' running",
        "File 'f'                            accessible",
        "System 'system_vm-1'                running",
    ]


def test_monit_status_aligns_values_like_monit() -> None:
    text = monit_text.status(
        shown(service(), service("db", phase="down", state="failing", pid=0, reason="the process ended")), MACHINE
    )

    assert text.split("\n") == [
        "The Monit daemon 5.2.5 uptime: 1d 1h 1m ",
        "",
        "Process 'web'",
        "  status                            running",
        "  monitoring status                 monitored",
        "  pid                               41",
        "  parent pid                        1",
        "  uptime                            1h 2m ",
        "  children                          2",
        "  memory kilobytes                  1000",
        "  memory kilobytes total            3000",
        "  memory percent                    0.0%",
        "  memory percent total              0.2%",
        "  cpu percent                       1.0%",
        "  cpu percent total                 2.5%",
        "  data collected                    Sat Aug  1 10:00:00 2026",
        "",
        "Process 'db'",
        "  status                            Does not exist",
        "  monitoring status                 monitored",
        "  message                           the process ended",
        "  data collected                    Sat Aug  1 10:00:00 2026",
        "",
        "System 'system_vm-1'",
        "  status                            running",
        "  monitoring status                 monitored",
        "  load average                      [0.50] [1.25] [2.00]",
        "  data collected                    Sat Aug  1 10:00:00 2026",
        "",
    ]


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"phase": "stopped"}, "not monitored"),
        ({"phase": "unmonitored"}, "not monitored"),
        ({"phase": "stopping"}, "not monitored - stop pending"),
        ({"phase": "starting"}, "initializing - start pending"),
        ({"phase": "settling"}, "initializing"),
        ({"phase": "restarting"}, "Does not exist - restart pending"),
        ({"phase": "down", "reason": "the process exited unexpectedly"}, "Does not exist"),
        ({"phase": "down", "reason": "cannot start: no such file"}, "Execution failed"),
        ({"phase": "broken"}, "Execution failed"),
        ({"kind": "host"}, "online with all services"),
        ({"state": "failing", "faults": ["Connection failed", "Resource limit matched"]}, "Connection failed"),
    ],
)
def test_monit_command_shows_states_in_the_same_words_as_monit(members: dict[str, Any], text: str) -> None:
    assert monit_text.words(service(**members)) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0m "), (59, "0m "), (3600, "1h 0m "), (86400, "1d 0h 0m "), (90061, "1d 1h 1m ")]
)
def test_monit_durations_omit_empty_units(seconds: int, text: str) -> None:
    assert monit_text.duration(seconds) == text


@pytest.mark.parametrize(
    ("line", "action", "names", "group"),
    [
        ("stop web", "stop", ["web"], ""),
        ("stop all", "stop", ["all"], ""),
        ("stop -g vcap", "stop", ["all"], "vcap"),
        ("-g vcap stop", "stop", ["all"], "vcap"),
        ("-gvcap restart all", "restart", ["all"], "vcap"),
        ("-I monitor web", "monitor", ["web"], ""),
        ("-c /var/vcap/bosh/etc/monitrc unmonitor web", "unmonitor", ["web"], ""),
        ("-c /dev/null unmonitor web", "unmonitor", ["web"], ""),
    ],
)
def test_monit_options_may_precede_or_follow_the_action(
    asked: list[dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
    line: str,
    action: str,
    names: list[str],
    group: str,
) -> None:
    assert monit.main(line.split()) == 0

    assert [(one["action"], one["names"], one["group"]) for one in asked] == [(action, names, group)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("start", "please specify the configured service name or 'all' after start"),
        ("dance", "invalid argument -- dance"),
        ("-Z", "invalid option -- Z  (-h will show valid options)"),
        ("summary -c", "option -- c requires an argument"),
        ("-c /no/such summary", "Cannot stat the control file '/no/such' -- No such file or directory"),
    ],
)
def test_invalid_monit_arguments_exit_with_1(
    asked: list[dict[str, Any]], capfd: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert monit.main(line.split()) == 1

    out, err = capfd.readouterr()
    assert (out, asked) == ("", [])
    assert err.startswith(f"monit: {said}")


def test_monit_messages_begin_with_the_program_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/monit-actual"])
    refusal = {"exception": {"message": "There is no service by that name"}}
    monkeypatch.setattr(control_client, "ask", lambda *_: refusal)

    assert monit.main(["stop", "nothing"]) == 1
    assert capfd.readouterr().err == "monit-actual: action failed -- There is no service by that name\n"


@pytest.mark.parametrize(
    ("action", "status", "said"),
    [
        ("summary", 0, "monit: no status available -- the monit daemon is not running\n"),
        ("status", 0, "monit: no status available -- the monit daemon is not running\n"),
        ("reload", 1, "monit: the monit daemon is not running\n"),
        ("quit", 1, "monit: the monit daemon is not running\n"),
        ("validate", 1, "monit: the monit daemon is not running\n"),
        ("stop web", 1, "monit: the monit daemon is not running\n"),
    ],
)
def test_monit_command_without_an_agent_reports_no_daemon(
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    action: str,
    status: int,
    said: str,
) -> None:
    def ask(*_: object) -> None:
        raise NoAgentError("nobody")

    monkeypatch.setattr(control_client, "ask", ask)

    assert monit.main(action.split()) == status
    assert capfd.readouterr() == ("", said)


def test_monit_reload_and_quit_print_the_same_messages_as_monit(
    asked: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert monit.main(["reload", "web"]) == 0
    assert capfd.readouterr() == ("", "Reinitializing monit daemon\n")
    assert monit.main(["quit"]) == 0
    assert capfd.readouterr() == ("monit daemon with pid [7] killed\n", "")
    assert [one["action"] for one in asked] == ["reload", "quit"]


@pytest.mark.parametrize(
    ("members", "status", "said"),
    [
        ({}, 1, ""),
        ({"phase": "down", "state": "failing", "reason": "it ended"}, 0, "'web' it ended\n"),
        ({"state": "failing", "faults": ["Connection failed"], "reason": "no answer"}, 1, "'web' no answer\n"),
        ({"state": "failing", "faults": ["Invalid type"], "reason": "a link"}, 0, "'web' a link\n"),
    ],
)
def test_monit_validate_exits_with_the_same_codes_as_monit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], members: dict[str, Any], status: int, said: str
) -> None:
    """As in monit 5.2.5, exit code 1 means that there is no error. A closed port does not count as an error."""
    monkeypatch.setattr(control_client, "ask", lambda *_: shown(service(**members)))

    assert monit.main(["validate"]) == status
    assert capfd.readouterr() == ("", said)


@pytest.mark.parametrize("line", ["", "-g vcap", "-I"])
def test_monit_without_an_action_wakes_the_daemon(
    asked: list[dict[str, Any]], capfd: pytest.CaptureFixture[str], line: str
) -> None:
    assert monit.main(line.split()) == 0
    assert capfd.readouterr() == ("", "monit daemon at 7 awakened\n")


def test_monit_verbose_lists_the_services_first(asked: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> None:
    assert monit.main(["-v", "stop", "web"]) == 0

    assert "\nProcess Name          = web\n Group                = vcap\n" in capfd.readouterr().out
    assert [one["action"] for one in asked] == ["show", "stop"]


def test_monit_procmatch_lists_processes_matching_a_pattern(capfd: pytest.CaptureFixture[str]) -> None:
    own = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()
    word = own.split(" ")[0]
    assert monit.main(["procmatch", f"^{word}"]) == 0
    out = capfd.readouterr().out.splitlines()

    assert out[:2] == [f'List of processes matching pattern "^{word}":', "-" * 42]
    assert any(line.startswith(f"\t{word}") for line in out)
    assert any(line.startswith("Total matches: ") for line in out)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("procmatch", 'Invalid syntax - usage: procmatch "<pattern>"\n'),
        ("procmatch (", "Regex ( parsing error: Unmatched ( or \\(\n"),
    ],
)
def test_monit_procmatch_with_an_invalid_pattern_exits_with_1(
    capfd: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert monit.main(line.split()) == 1
    assert capfd.readouterr() == (said, "")


@pytest.mark.parametrize("line", ["summary", "status", "stop web", "reload", "validate", "quit", "-v summary", ""])
def test_monit_command_fails_for_a_user_without_permission(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str
) -> None:
    """The exit code is always 1, because monit exits with 1 if the control file belongs to another user."""

    def ask(*_: object) -> None:
        raise NoAgentError("no") from PermissionError()

    monkeypatch.setattr(control_client, "ask", ask)
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/monit"])

    assert monit.main(line.split()) == 1
    said = "The control file '/var/vcap/bosh/etc/monitrc' must be owned by you (use sudo)."
    assert capfd.readouterr() == ("", f"monit: {said}\n")


def test_monit_command_shows_a_configured_system_check_instead_of_the_implicit_check() -> None:
    services = shown(service(), service("ours", kind="system"))

    assert monit_text.summary(services, MACHINE).splitlines()[2:] == [
        "Process 'web'                       running",
        "System 'ours'                       running",
    ]
    status = monit_text.status(services, MACHINE)
    assert status.count("System '") == 1
    assert "  load average                      [0.50] [1.25] [2.00]\n" in status


def test_monit_status_shows_response_times() -> None:
    responses = [
        {"kind": "TCP", "seconds": 0.0126, "host": "h", "port": 80, "request": "/x", "protocol": "HTTP"},
        {"kind": "UNIX", "seconds": -1.0, "path": "/s", "protocol": "DEFAULT"},
        {"kind": "UDP", "seconds": 0.0, "host": "h", "port": 53, "request": "", "protocol": "DNS"},
        {"kind": "ICMP", "seconds": 2.0},
    ]
    text = monit_text.status(shown(service(kind="host", responses=responses)), MACHINE)

    assert (
        "  port response time                0.013s to h:80/x [HTTP via TCP]\n"
        "  unix socket response time         0.000s to /s [DEFAULT]\n"
        "  port response time                0.000s to h:53 [DNS via UDP]\n"
        "  icmp response time                2.000s [Echo Request]\n"
    ) in text
    stopped = shown(service(kind="host", phase="stopped", state="unknown", responses=responses))
    assert "response time" not in monit_text.status(stopped, MACHINE)


def test_monit_command_reports_the_same_version_as_on_stemcells(capfd: pytest.CaptureFixture[str]) -> None:
    assert monit.main(["-V"]) == 0
    assert capfd.readouterr().out.startswith("This is Monit version 5.2.5\n")


@pytest.mark.parametrize("form", [["-t", "{file}"], ["-t", "-c", "{file}"], ["-c{file}", "-t"], ["-t", "-b", "{base}"]])
def test_monit_t_option_checks_the_control_file_syntax(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], form: list[str]
) -> None:
    file = tmp_path / "monit/job/0000_web.monitrc"
    file.parent.mkdir(parents=True)
    line = [word.format(file=file, base=tmp_path) for word in form]

    file.write_text("check process web with pidfile /run/web.pid\n")
    assert monit.main(line) == 0
    assert capfd.readouterr() == ("", "Control file syntax OK\n")

    file.write_text("check process web with pidfile\n")
    assert monit.main(line) == 1
    assert "0000_web.monitrc: line 2" in capfd.readouterr().err
