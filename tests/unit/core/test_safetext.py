"""Tests that untrusted text is escaped wherever it is shown."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_shim.cli import bpm_logs, status_text
from agent_shim.core import log, safetext
from agent_shim.edges import alerts, monit_text
from agent_shim.services.logs import tail
from tests.support.terminals import Terminal
from tests.unit.cli.test_status_text import shown

NASTY = {
    "a title of the terminal": "\x1b]0;owned\x07",
    "a colour": "\x1b[31m",
    "a control sequence of eight bits": "\x9b31m",
    "a line break": "\nERROR forged",
    "a carriage return": "\rforged",
    "a separator of lines": "\u2028forged",
    "another direction": "\u202egnp.exe",
    "isolated directions": "\u2066a\u2069",
    "an undecodable byte": os.fsdecode(b"\xff"),
    "a NUL": "\0",
    "DEL": "\x7f",
    "invisible letters": "\U000e0041",
}
nasty = pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)


def is_safe(text: str) -> bool:
    """Return True if a terminal displays every character instead of interpreting it."""
    text.encode()
    return text.isprintable()


@pytest.mark.attack("text from a job sends control sequences to an operator's terminal")
@nasty
def test_safe_line_shows_escaped_characters(text: str) -> None:
    shown = safetext.line(f"before{text}after")

    assert is_safe(shown)
    assert json.loads(f'"{shown}"') == f"before{text}after"


@given(st.text(st.characters()))
def test_safe_text_is_a_single_line_that_can_be_encoded(text: str) -> None:
    shown = safetext.line(text)

    assert "\n" not in shown
    shown.encode()
    assert safetext.line(shown) == shown
    safetext.lines(text).encode()


def test_safe_text_keeps_letters_from_all_languages() -> None:
    assert safetext.line("größe 大きさ حجم 🎉") == "größe 大きさ حجم 🎉"
    assert safetext.lines("a\tb\nc") == "a\tb\nc"


def test_long_safe_label_is_truncated() -> None:
    assert len(safetext.label("x" * 10_000)) == safetext.MAX_LABEL_CHARS


@nasty
def test_safe_value_escapes_nested_values(text: str) -> None:
    shown = safetext.value({text: [text, {"a": text}, 1, None, True]})

    (key,) = shown
    assert is_safe(key)
    assert is_safe(shown[key][0])
    assert is_safe(shown[key][1]["a"])
    assert shown[key][2:] == [1, None, True]


@pytest.mark.attack("text from a job forges lines in the agent's log, in alerts or in an archive's remarks")
@nasty
def test_alert_text_is_safe_to_send_and_show(text: str) -> None:
    message = alerts.alert_of(f"web{text}", "Does not exist", "restart", f"ended{text}", [], 0)

    assert message is not None
    alert = json.loads(message)
    assert is_safe(alert["title"])
    assert is_safe(alert["summary"].replace("\n", ""))


@pytest.mark.attack("text from a job sends control sequences to an operator's terminal")
@nasty
def test_control_characters_in_job_output_are_escaped(text: str) -> None:
    written = f"said{text}".encode(errors="surrogatepass")
    line = tail.LogLine(f"web{text}", f"a{text}.log", written)

    assert is_safe(line.plain().replace("\n", "").replace("\t", ""))
    assert is_safe(line.as_json())
    assert json.loads(line.as_json())["message"] == written.decode(errors="replace")


@pytest.mark.attack("text from a job forges lines in the agent's log, in alerts or in an archive's remarks")
@nasty
@pytest.mark.parametrize("form", ["json", "text"])
def test_log_line_is_escaped(text: str, form: str) -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "read %s", (text,), None)
    record.members = {f"file{text}": text}
    formatter = log.JsonLines() if form == "json" else log.TextLines()

    assert is_safe(formatter.format(record))


SERVICE = {
    "kind": "process", "pid": 0, "phase": "down", "state": "failing", "faults": [], "unheeded": [], "uptime_secs": 0,
    "mem_kb": 0, "cpu_total": 0.0, "restarts": 0, "last_exit": "", "parent": 0, "children": 0,
}  # fmt: skip


@pytest.mark.attack("text from a job sends control sequences to an operator's terminal")
@nasty
def test_monit_output_is_escaped(text: str) -> None:
    shown = {"services": [SERVICE | {"name": f"web{text}", "reason": f"ended{text}"}], "uptime_secs": 1}
    here = monit_text.HostFacts("here", (0.0, 0.0, 0.0), "now")

    for page in (monit_text.summary(shown, here), monit_text.status(shown, here)):
        assert all(is_safe(line) for line in page.split("\n"))
        assert "forged" not in [line.strip() for line in page.split("\n")]


@pytest.mark.attack("text from a job sends control sequences to an operator's terminal")
@nasty
def test_status_table_is_escaped(text: str) -> None:
    page = status_text.render(safetext.value(shown(processes=[SERVICE | {"name": f"web{text}", "reason": text}])))

    assert all(is_safe(row) for row in page.split("\n"))


def test_character_split_over_two_log_writes_is_shown_whole(tmp_path: Path) -> None:
    log_file = tmp_path / "web.stdout.log"
    log_file.touch()
    one = bpm_logs.Log(str(log_file), str(tmp_path))
    one.open()
    first, second = "ü".encode()[:1], "ü".encode()[1:]

    with Terminal() as terminal, open(os.dup(terminal.theirs), "wb") as out:
        for part in (first, second):
            with log_file.open("ab") as file:
                file.write(part)
            bpm_logs.copy(one, out)

        assert terminal.read() == "ü".encode()
