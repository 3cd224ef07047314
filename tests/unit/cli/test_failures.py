"""Tests that failing commands print a message, exit with a documented exit code, and create no files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_shim.cli import commands
from tests.support import control_peer

NOT_THERE = 66
UNPRIVILEGED_UID = 65534


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a base directory with two jobs' logs and the agent's log."""
    for name, text in (("web/web.stdout.log", "web up\n"), ("db/db.stdout.log", "db up\n")):
        path = tmp_path / "data/sys/log" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "bosh/log").mkdir(parents=True)
    (tmp_path / "bosh/log/current").write_text("booted\n")
    return tmp_path


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Switch to an ordinary user if the tests run as root, because root can read any file regardless of its mode."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(UNPRIVILEGED_UID)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def run(*words: str) -> int:
    """Run a command and return its exit code, even if argparse exits because of a usage error."""
    try:
        return commands.main(words)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


@pytest.mark.parametrize("words", [("logs",), ("logs", "web"), ("logs", "--agent"), ("handback",)], ids=" ".join)
def test_missing_base_directory_is_an_error_and_is_not_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    base = tmp_path / "none"

    assert run(*words, "-b", str(base)) == NOT_THERE
    assert f"there is no directory {base}" in capsys.readouterr().err
    assert not base.exists()


def test_logs_command_fails_for_a_base_directory_without_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("logs", "-b", str(tmp_path)) == NOT_THERE
    assert f"there is no directory {tmp_path}/data/sys/log" in capsys.readouterr().err


def test_handback_creates_no_file_in_a_base_directory_without_an_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("handback", "-b", str(tmp_path)) == 0
    assert f"no agent has run below {tmp_path}\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "closed", "said"),
    [
        (("logs", "--agent"), "bosh", "cannot show the agent's log"),
        (("logs", "--agent"), "bosh/log/current", "cannot show log/current"),
        (("logs", "web"), "data/sys/log/web", "cannot show web"),
        (("logs",), "data/sys/log/web", "cannot show web"),
        (("logs",), "data/sys/log/web/web.stdout.log", "cannot show web/web.stdout.log"),
        (("logs",), "data/sys/log", "cannot show logs"),
        (("handback",), "bosh", "cannot hand back"),
    ],
)
def test_command_error_names_unreadable_files(
    tree: Path, capfdbinary: pytest.CaptureFixture[bytes], words: tuple[str, ...], closed: str, said: str
) -> None:
    """The exit code must not be 0 if only some of the logs could be shown."""
    for above in (tree, *tree.parents[:3]):
        above.chmod(above.stat().st_mode | 0o755)
    (tree / closed).chmod(0)
    try:
        with as_another_user():
            code = run(*words, "-b", str(tree))
    finally:
        (tree / closed).chmod(0o755)

    shown = capfdbinary.readouterr()
    assert code in (1, NOT_THERE)
    assert f"agent-shim: {said}" in shown.err.decode()
    assert "Permission denied" in shown.err.decode()
    assert (b"db up" in shown.out) == (words == ("logs",) and closed != "data/sys/log")


def test_logs_command_lists_known_jobs_if_the_job_is_unknown(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("logs", "wed", "-b", str(tree)) == NOT_THERE
    assert "there are no logs of wed: did you mean web? (there are db, web)" in capsys.readouterr().err


@contextlib.contextmanager
def fake_agent(base: Path, *names: str) -> Iterator[list[Any]]:
    """Run a fake agent that has the services ``names``. Yield the list of requests that it receives."""
    seen: list[Any] = []

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(request)
        if request.get("action") == "show":
            return {"services": [{"name": name} for name in names]}
        return {"exception": {"message": "There is no service by that name"}}

    with control_peer.answering(base, reply):
        yield seen


def test_command_lists_known_services_if_the_service_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_agent(tmp_path, "web", "worker"):
        code = run("stop", "web", "wroker", "-b", str(tmp_path))

    assert code == NOT_THERE
    assert "cannot stop wroker: there is no such service: did you mean worker? (there are web, worker)" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("get_stat",), "there is no method get_stat: did you mean get_state? (there are add_"),
        (("get_state", "full", "now"), "get_state takes at most 1 argument, not 2"),
        (("cancel_task",), "Not enough arguments, expected 1, got 0"),
        (("run_script", "pre-start", "soon"), "cannot call run_script: "),
    ],
)
def test_call_command_arguments_are_checked_before_the_request_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    with fake_agent(tmp_path) as seen:
        assert run("call", *words, "-b", str(tmp_path)) == commands.USAGE
    assert said in capsys.readouterr().err
    assert seen == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("statsu",), "did you mean status?"),
        (("stop", "web", "--wiat"), "did you mean --wait?"),
        (("probe", "raedy"), "did you mean ready?"),
        (("logs", "-n", "-5"), "-5"),
        (("logs", "--since", "soon"), "soon is neither a time nor a duration"),
    ],
)
def test_usage_error_suggests_a_correction_or_names_the_invalid_value(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert run(*words) == commands.USAGE
    shown = capsys.readouterr().err
    assert shown.startswith("usage: agent-shim")
    assert said in shown


def test_daemon_exits_with_a_message_if_its_base_directory_cannot_be_created(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "agent_shim.core.log.setup", lambda **_: None
    )  # log.setup needs stderr's descriptor, which capsys replaces
    assert run("run", "-b", "/proc/nope") == 70
    assert "agent-shim: cannot start: " in capsys.readouterr().err
