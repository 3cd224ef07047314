"""Tests reading monit's control file: the one in a stemcell, other valid files, and errors with their position."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_shim.core.errors import ConfigError
from agent_shim.supervisor.monit import control_file
from tests.support import monitrc

CHECK = "check process {0} with pidfile /run/{0}.pid\n  group vcap\n"


def read(base: Path, text: str) -> control_file.Control:
    path = base / "monitrc"
    path.write_text(text)
    return control_file.read(path)


def test_monit_control_file_in_a_stemcell_is_read(tmp_path: Path) -> None:
    """Like monit, the agent reads included files in descending order of their names. The names begin with numbers that
    descend from the first job to the last, so the result is the manifest's order.
    """
    (tmp_path / "job").mkdir()
    (tmp_path / "monit.user").write_text("vcap:secret\n")
    (tmp_path / "alerts.monitrc").write_text(monitrc.alerts())
    for number, name in enumerate(["worker", "web"]):
        (tmp_path / f"job/{number:04}_{name}.monitrc").write_text(CHECK.format(name))

    http = f"port 2822 and use address 127.0.0.1 allow cleartext {tmp_path}/monit.user"

    found = read(tmp_path, monitrc.control(tmp_path, http=http, is_whole=True))

    assert (found.poll, found.address, found.port) == (10, "127.0.0.1", 2822)
    assert found.logfile == tmp_path / "monit.log"
    assert found.credentials() == {b"vcap:secret": True}
    assert (found.recipients, found.mail_servers, found.mail_timeout) == (["agent@local"], [("localhost", 2825)], 15)
    assert (found.queue, found.slots) == (Path("/var/vcap/monit/events"), 5000)
    assert found.mail_format["message"].startswith("Service: $SERVICE\n  Event: $EVENT\n")
    # The control file itself and alerts.monitrc contain no checks.
    assert [each.job for each in found.job_files] == ["monitrc", "alerts", "web", "worker"]
    assert None not in (found.pidfile, found.idfile, found.statefile)


@pytest.mark.parametrize(
    ("text", "users"),
    [
        ("allow vcap:secret", {b"vcap:secret": True}),
        ('allow vcap:"a b"', {b"vcap:a b": True}),
        ("allow vcap:1234 allow look:x read-only", {b"vcap:1234": True, b"look:x": False}),
        ("allow localhost", None),
        ("allow 127.0.0.0/8", None),
        ("allow 127.0.0.1 allow vcap:x", {b"vcap:x": True}),
        ("", {}),
    ],
)
def test_monit_control_file_allow_statements_determine_who_may_send_requests(
    tmp_path: Path, text: str, users: dict[bytes, bool] | None
) -> None:
    """If only hosts are allowed, no password is required, so there are no credentials (None). Without any ``allow``,
    nobody may send requests.
    """
    assert read(tmp_path, f"set httpd port 2822 {text}").credentials() == users


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("set daemon 10\nset httpd port 2822\n  allow 10.0.0.1\n", "line 3 column 9: found '10.0.0.1'"),
        ("set httpd port 2822 allow localhost allow 10.0.0.1", "line 1 column 43: found '10.0.0.1'"),
        ("set httpd port 2822 allow crypt /x", "line 1 column 27: found 'crypt'"),
        ("set httpd port x", "line 1 column 16: found 'x', expected a port"),
        ("set daemon\n  ten", "line 2 column 3: found 'ten'"),
        ("\nsett daemon 10", "line 2 column 1: found 'sett', expected 'check' or 'set'"),
        ("set mailserver mail username a password b", "line 1 column 21: found 'username'"),
        ("set mail-format { from: a@b ", "line 1 column 29: found the end of the file"),
        ("check process web\n  with pidfile x", "line 2 column 16: found 'x'"),
        ("set alert nobody", "line 1 column 11: found 'nobody', expected a mail address"),
    ],
)
def test_monit_control_file_error_contains_line_and_column(tmp_path: Path, text: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)

    assert f"cannot read {tmp_path / 'monitrc'}: " in str(caught.value)
    assert mistake in str(caught.value)


def test_monit_control_file_error_contains_no_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "set httpd port 2822 allow vcap:secret\n allow vcap:monitor\n allow x:'hidden")

    assert "hidden" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_monit_control_file_skips_only_the_invalid_statement_in_an_include(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.conf").write_text("set daemon ten\nset alert a@b\n" + CHECK.format("web"))
    found = read(tmp_path, f"set daemon 7\ninclude {tmp_path}/*.conf\ninclude {tmp_path}/none/*\n")

    assert (found.poll, found.recipients) == (7, ["a@b"])
    assert [each.job for each in found.job_files] == ["monitrc", "a"]
    assert "a.conf: line 1 column 12: found 'ten'" in caplog.text


def test_monit_control_file_logs_statements_without_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(tmp_path, "set expectbuffer 4 kb\nset init\nset daemon 5")

    assert "not acted on: set expectbuffer" in caplog.text


def test_missing_monit_control_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*: No such file or directory"):
        control_file.read(tmp_path / "monitrc")
