"""Tests ``agent-shim check``: file type detection, errors with their position, and exit codes."""

from __future__ import annotations

import json
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
        ("agent-of-the-test-site.json", "agent"),
        ("warden-cpi-agent-env.json", "settings"),
        ("README", ""),
    ],
)
def test_check_infers_the_kind_from_the_file_name(name: str, kind: str) -> None:
    assert check.kind_of(name) == kind


def test_check_accepts_valid_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "monit").write_text(GOOD)
    (tmp_path / "agent.json").write_text("{}")
    (tmp_path / "bpm.yml").write_text("")
    (tmp_path / "settings.json").write_text('{"agent_id": "a", "mbus": "nats://127.0.0.1:4222"}')

    assert main(["check", *(str(path) for path in sorted(tmp_path.iterdir()))]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("monit", "check process web\n  with nonsense", "line 2"),
        ("agent.json", "{", "agent's configuration"),
        ("agent.json", '{\n "AgentShim" 5}', "(line 2 column 14)"),
        ("settings.json", '{"agent_id": "a",\n\n  "mbus" 5}', "(line 3 column 10)"),
        ("settings.json", '{"agent_id": 3}', "$.agent_id"),
        ("settings.json", '{"agent_id": "a"}', "$.mbus"),
        ("settings.json", '{"agent_id": "a", "mbus": "nats//foo"}', "$.mbus is not an address"),
        ("settings.json", '{"agent_id": "a", "mbus": "nats://h:70000"}', "$.mbus is not an address"),
        ("bpm.yml", "processes:\n- name: x\n", "executable"),
    ],
)
def test_check_error_names_the_file_and_the_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)

    assert main(["check", str(tmp_path / name)]) == 78
    error = capsys.readouterr().err
    assert name in error
    assert said in error


def test_check_exits_with_66_if_a_file_is_missing_unless_another_is_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "monit")]) == 66
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "agent.json").write_text("{")
    assert main(["check", str(tmp_path / "monit"), str(tmp_path / "agent.json")]) == 78


def test_check_requires_an_option_if_the_file_name_does_not_reveal_the_kind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(GOOD)

    assert main(["check", str(tmp_path / "file")]) == 2
    assert main(["check", "--as", "monit", str(tmp_path / "file")]) == 0


def test_check_prefers_the_kind_option_over_the_file_name(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text(GOOD)

    assert main(["check", str(tmp_path / "agent.json")]) == 78
    assert main(["check", "--as", "monit", str(tmp_path / "agent.json")]) == 0


def test_check_warns_about_dependencies_on_other_jobs_and_rejects_duplicate_services(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.monit").write_text(GOOD.replace("group vcap", "group vcap\n  depends on elsewhere"))
    assert main(["check", str(tmp_path / "a.monit")]) == 0
    assert "warning:" in capsys.readouterr().err

    (tmp_path / "b.monit").write_text(GOOD)
    assert main(["check", str(tmp_path / "a.monit"), str(tmp_path / "b.monit")]) == 78


AGENT = {
    "AgentShim": {
        "http": "nine",
        "logLevel": "loud",
        "logFormat": "xml",
        "monit": {"http": "127.0.0.1:65536", "mail": "off"},
        "ssh": {"port": 70000},
        "logs": {"keep": "all", "size": "50 MB"},
    }
}


def test_check_reports_all_errors_in_a_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.json").write_text(json.dumps(AGENT))
    (tmp_path / "bpm.yml").write_text("processes:\n- name: a\n- executable: b\n  limits: {memory: lots}\n")
    (tmp_path / "settings.json").write_text('{"agent_id": 3, "mbus": "nats//x", "ntp": 5}')

    assert main(["check", *(str(path) for path in sorted(tmp_path.iterdir()))]) == 78
    agent, bpm, settings = capsys.readouterr().err.splitlines()
    for key in ("http", "logLevel", "logFormat", "monit.http", "ssh.port", "logs.keep", "logs.size"):
        assert f"`$.AgentShim.{key}`" in agent
    assert "mail" not in agent
    for key in ("processes[0].executable", "processes[1].name", "processes[1].limits.memory"):
        assert key in bpm
    assert "`$.agent_id`" in settings
    assert "`$.ntp`" in settings


def test_check_rejects_a_job_directory_as_a_bpm_volume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "web/config/bpm.yml"
    file.parent.mkdir(parents=True)
    file.write_text("processes:\n- {name: a, executable: b, additional_volumes: [{path: /var/vcap/store/web}]}")

    assert main(["check", str(file)]) == 78
    assert "/var/vcap/store/web" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no processes, so nothing runs"),
        ("processes: []", "there are no processes, so nothing runs"),
        ("proceses: [{name: a}]", "did you mean processes?"),
        ("processes: [{name: a, executable: b}, {name: a, executable: c}]", "2 processes are named a, and only "),
    ],
)
def test_check_warns_about_a_bpm_file_with_ignored_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    """bpm accepts such a file, so the warning is an error only with ``--strict``."""
    (tmp_path / "bpm.yml").write_text(text)

    assert main(["check", str(tmp_path / "bpm.yml")]) == 0
    assert said in capsys.readouterr().err
    assert main(["check", "--strict", str(tmp_path / "bpm.yml")]) == 78


def test_check_rejects_a_bpm_command_for_a_process_that_bpm_yml_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monit = tmp_path / "web/monit"
    (tmp_path / "web/config").mkdir(parents=True)
    bpm = "/var/vcap/jobs/bpm/bin/bpm"
    monit.write_text(
        f'check process web with pidfile /x\n start program "{bpm} start web -p worker"\n'
        f' stop program "{bpm} stop web -p worker"\n group vcap\n'
    )
    assert main(["check", str(monit)]) == 0

    (tmp_path / "web/config/bpm.yml").write_text("processes: [{name: web, executable: b}]")

    assert main(["check", str(monit)]) == 78
    said = capsys.readouterr().err
    assert said.count("names the process worker, but ") == 2
    assert said.count("bpm.yml only defines: web") == 2


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ("agrs: [c]", "line 2: unknown key processes[0].agrs: did you mean args?"),
        ("limits: {memroy: 1G}", "did you mean memory?"),
        ("unsafe: {priviliged: true}", "did you mean privileged?"),
    ],
)
def test_check_warns_about_an_unknown_bpm_key_with_a_suggestion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], member: str, said: str
) -> None:
    """An error would be wrong, because bpm ignores unknown keys."""
    (tmp_path / "bpm.yml").write_text(f"processes:\n- {{name: a, executable: b, {member}}}")

    assert main(["check", str(tmp_path / "bpm.yml")]) == 0
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert said in warning


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("bpm.yml", "processes:\n- {name: a, agrs: [c]}", "line 2: unknown key processes[0].agrs"),
        ("monit", "set daemon 5\ncheck nonsense", "line 1: not acted on: set daemon"),
    ],
)
def test_check_prints_warnings_in_addition_to_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)

    assert main(["check", str(tmp_path / name)]) == 78
    warning, mistake = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ")
    assert said in warning
    assert "expected" in mistake


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"AgentShim": {"logLevle": "info"}}', ["$.AgentShim.logLevle`: did you mean logLevel?"]),
        ('{"AgentShim": {"monit.http": "off"}}', ['did you mean {"monit": {"http": …}}?']),
        ('{"AgentShim": {"logs": {"siez": "1M"}}}', ["$.AgentShim.logs.siez`: did you mean size?"]),
        ('{"AgentShm": {"spec": "/x"}}', ["$.AgentShm`: did you mean AgentShim?"]),
        ('{"AgentShim": {"logLevle": "info", "http": "nine"}}', ["did you mean logLevel?", "expected ADDR:PORT"]),
    ],
)
def test_check_rejects_an_unknown_key_in_agent_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: list[str]
) -> None:
    """Only this agent reads these keys, so a misspelt one would silently have no effect."""
    (tmp_path / "agent.json").write_text(text)

    assert main(["check", str(tmp_path / "agent.json")]) == 78
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [words in line for words, line in zip(said, printed.err.splitlines(), strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"AgentShim": {"spec": "/rendered"}}', "good (agent), the agent deploys /rendered"),
        ("{}", "the agent waits for settings in /var/vcap/bosh/warden-cpi-agent-env.json, /var/vcap/bosh/"),
        (
            '{"Infrastructure": {"Settings": {"Sources": [{"Type": "File", "SettingsPath": "/x.json"}]}}}',
            "the agent waits for settings in /x.json",
        ),
    ],
)
def test_check_of_a_valid_agent_json_says_what_the_agent_will_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "agent.json").write_text(text)

    assert main(["check", str(tmp_path / "agent.json")]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            'start progam "/x start"',
            "line 1: the start program of web, 'progam', is not an absolute path, expected 'start program \"/…\"'",
        ),
        ('stop porgram "/x stop"', "the stop program of web, 'porgram', is not an absolute path"),
        ('start program "x"', "the start program of web, 'x', is not an absolute path"),
        (
            'start program "/x"\nstp program "/x stop"',
            "'stp' is an argument of the start program of web, expected 'stop",
        ),
        (
            'stop program "/x"\nstrat program "/x a"',
            "'strat' is an argument of the stop program of web, expected 'start",
        ),
        ('if not exist then exec "reboot now"', "line 2: the program 'reboot' is not an absolute path"),
        ('strat program "/x start"', "line 2 column 1: found 'strat', expected an option of check process"),
    ],
)
def test_check_rejects_a_misspelt_program_statement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    """monit accepts most of these files. For example, it would run a program called ``progam``."""
    (tmp_path / "monit").write_text(f"check process web with pidfile /x\n{line}\n")

    assert main(["check", str(tmp_path / "monit")]) == 78
    assert said in capsys.readouterr().err


def test_check_strict_rejects_statements_without_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "monit").write_text(
        "check process web with pidfile /x group vcap\n start program '/x'\n alert a@b\n depends on other\n"
        " if failed port 5 protocol mysql then alert\n if failed port 5 protocol http then alert\n"
    )
    found = (
        "monit: line 3: not acted on: alert a@b",
        "monit: line 5: not acted on: protocol mysql (only the connection is tested)",
        "monit: line 1: not acted on: restart when it ends (it has no stop program)",
    )

    for words, code in (([], 0), (["--strict"], 78)):
        assert main(["check", *words, str(tmp_path / "monit")]) == code
        lines = capsys.readouterr().err.splitlines()
        assert all(any(each in line for line in lines) for each in found)
        assert sum(line.startswith("warning: ") for line in lines) == (1 if words else 4)


def test_check_accepts_keys_that_only_the_go_agent_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.json").write_text(
        '{"Platform": {"Linux": {"UseDefaultTmpDir": true}}, "Infrastructure": {"x": 1}}'
    )

    assert main(["check", str(tmp_path / "agent.json")]) == 0
    assert capsys.readouterr().err == ""


def test_check_warns_about_a_process_outside_the_vcap_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "monit"
    path.write_text(GOOD.replace("  group vcap\n", "  group other\ncheck file f with path /f\n"))

    assert check.main([path], None, is_strict=True) == check.GOOD
    assert capsys.readouterr().err.startswith(f"warning: {path}: line 1: web lacks `group vcap`, so a Director ")


def test_check_warns_about_an_unsupported_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning contains only the first words of the rule, because the rest may be secret."""
    path = tmp_path / "monit"
    path.write_text("check process a pidfile /p group vcap\n  if failed port 1 protocol radius secret s then alert\n")

    assert check.main([path], None) == check.GOOD
    assert capsys.readouterr().err == f"warning: {path}: line 2: not acted on: if failed port\n"


def test_check_json_has_the_findings_for_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.json").write_text('{"AgentShim": {"agrs": 1, "http": "nine"}}')
    (tmp_path / "bpm.yml").write_text("processes:\n- {name: a, executable: b, agrs: [c]}")

    assert main(["check", "--json", str(tmp_path / "agent.json"), str(tmp_path / "bpm.yml")]) == 78
    agent, bpm = json.loads(capsys.readouterr().out)
    assert (agent["kind"], agent["is_good"], len(agent["mistakes"])) == ("agent", False, 2)
    assert (bpm["kind"], bpm["is_good"], bpm["mistakes"], len(bpm["warnings"])) == ("bpm", True, [], 1)


@pytest.mark.parametrize("member", sorted(AGENT["AgentShim"]))
def test_check_and_daemon_reject_the_same_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], member: str
) -> None:
    config = tmp_path / "agent.json"
    config.write_text(json.dumps({"AgentShim": {member: AGENT["AgentShim"][member]}}))

    assert main(["check", str(config)]) == 78
    checked = capsys.readouterr().err
    assert main(["run", "-C", str(config), "-b", str(tmp_path / "vcap")]) == 78
    assert checked.strip() in capsys.readouterr().err
    assert not (tmp_path / "vcap").exists()
