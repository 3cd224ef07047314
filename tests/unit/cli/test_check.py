"""``agent-shim check``: kinds by name, errors with the place, exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_shim.cli import check
from agent_shim.cli.main import main

GOOD = 'check process web with pidfile /x/web.pid\n  start program "/x start"\n  stop program "/x stop"\n  group vcap\n'


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("monit", "monit"),
        ("0001_web.monitrc", "monit"),
        ("worker.monit", "monit"),
        ("bpm.yml", "bpm"),
        ("x.bpm.yml", "bpm"),
        ("agent.json", "agent"),
        ("warden-cpi-agent-env.json", "settings"),
        ("README", ""),
    ],
)
def test_the_name_tells_the_kind(name: str, kind: str) -> None:
    assert check.kind_of(name) == kind


def test_good_files_are_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "monit").write_text(GOOD)
    (tmp_path / "agent.json").write_text("{}")
    (tmp_path / "bpm.yml").write_text("")
    (tmp_path / "settings.json").write_text('{"agent_id": "a"}')

    assert main(["check", *(str(path) for path in sorted(tmp_path.iterdir()))]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("monit", "check process web\n  with nonsense", "line 2"),
        ("agent.json", "{", "agent's configuration"),
        ("settings.json", '{"agent_id": 3}', "$.agent_id"),
        ("bpm.yml", "processes:\n- name: x\n", "executable"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)

    assert main(["check", str(tmp_path / name)]) == 78
    error = capsys.readouterr().err
    assert name in error
    assert said in error


def test_a_missing_file_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "monit")]) == 78
    assert "No such file" in capsys.readouterr().err


def test_unknown_kind_is_a_usage_error_unless_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(GOOD)

    assert main(["check", str(tmp_path / "file")]) == 2
    assert main(["check", "--as", "monit", str(tmp_path / "file")]) == 0


def test_a_target_in_another_job_is_a_warning_and_a_duplicate_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.monit").write_text(GOOD.replace("group vcap", "group vcap\n  depends on elsewhere"))
    assert main(["check", str(tmp_path / "a.monit")]) == 0
    assert "warning:" in capsys.readouterr().err

    (tmp_path / "b.monit").write_text(GOOD)
    assert main(["check", str(tmp_path / "a.monit"), str(tmp_path / "b.monit")]) == 78
