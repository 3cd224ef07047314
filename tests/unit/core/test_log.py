"""Secrets are never written, whichever module logs them."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_shim.core import log
from agent_shim.core.errors import HostError


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dial nats://user:pass@10.0.0.1:4222", "dial nats://<redacted>@10.0.0.1:4222"),
        ("GET https://h/blob?sig=abc&e=1 failed", "GET https://h/blob?<redacted> failed"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----!", "<redacted>!"),
        ("-----BEGIN PRIVATE KEY-----\nMII cut", "<redacted>"),
        ("why? because", "why? because"),
    ],
)
def test_secrets_are_redacted(text: str, expected: str) -> None:
    assert log.redacted(text) == expected


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_of_either_form_carries_level_logger_and_message(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.setup(level="info", form=form)

    logging.getLogger("part").warning("url is %s", "nats://a:b@c")
    logging.getLogger("part").debug("not seen")
    logging.getLogger().handlers[0].close()

    line = stream.getvalue().strip()
    assert "a:b" not in line
    if form == "json":
        document = json.loads(line)
        assert (document["level"], document["logger"]) == ("warning", "part")
        assert document["message"] == "url is nats://<redacted>@c"
    else:
        assert line.endswith("WARNING part: url is nats://<redacted>@c")


@pytest.mark.parametrize("form", ["json", "text"])
def test_what_a_line_carries_beside_its_message_is_in_either_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line whatever is in it, and no secret."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.setup(level="info", form=form)

    members = {"method": "a\nb", "seconds": 0.5, "error": "GET https://h/b?sig=abc failed"}
    logging.getLogger("part").info("request", extra={"members": members})
    logging.getLogger().handlers[0].close()

    line = stream.getvalue().removesuffix("\n")
    if form == "json":
        document = json.loads(line)
        told = {"method": "a\nb", "seconds": 0.5, "error": "GET https://h/b?<redacted> failed"}
        assert {name: document[name] for name in told} == told
        assert document["message"] == "request"
    else:
        assert line.endswith(
            r'INFO    part: request method="a\nb" seconds=0.5 error="GET https://h/b?<redacted> failed"'
        )
    assert "\n" not in line


@pytest.mark.parametrize("form", ["json", "text"])
def test_texts_of_others_are_neither_lines_nor_orders_to_a_terminal(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line end and both introducers of escape sequences are escaped, in tracebacks too."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.setup(level="info", form=form)

    hostile = "a\n2026-01-01 ERROR forged\r\x1b[2J\x9b2J\u2028b\x85c"
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("part").exception("unknown method %s", hostile, extra={"members": {"method": hostile}})
    logging.getLogger().handlers[0].close()

    text = stream.getvalue()
    assert not set("\x1b\x9b\r\x85\u2028") & set(text)
    assert [line for line in text.splitlines() if line.startswith("2026-01-01")] == []
    if form == "json":
        assert json.loads(text)["method"] == hostile
    else:
        assert all(line.startswith("  | ") for line in text.splitlines()[1:])


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_traceback_tells_the_place_and_no_text_of_a_stranger(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreadable input may be a secret: the interpreter and libraries quote it in their errors."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.setup(level="info", form=form)

    secret = "s3cr3t"
    try:
        try:
            int(secret)
        except ValueError as exc:
            raise KeyError(secret) from exc
    except KeyError:
        logging.getLogger("part").exception("broken")
    try:
        raise ExceptionGroup(secret, [OSError(errno.ENOSPC, secret), HostError("cannot write /a: it is full")])
    except ExceptionGroup:
        logging.getLogger("part").exception("broken")
    logging.getLogger().handlers[0].close()

    text = stream.getvalue()
    assert "test_log.py" in text
    for told in ("ValueError", "KeyError", "ExceptionGroup", "OSError [Errno 28]", "HostError: cannot write /a"):
        assert told in text
    assert secret not in text


def said(text: str) -> None:
    logging.getLogger("part").info("%s", text)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``bosh logs --agent`` finds the log."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    log.setup(form="text", file=tmp_path / "log" / "current")
    return tmp_path / "log" / "current"


def test_a_file_gets_what_standard_error_gets(file: Path) -> None:
    """From the moment its directory is there; not for everybody to read."""
    said("too early")
    file.parent.mkdir()
    said("https://h/blob?sig=abc")
    said("\udcff")

    lines = file.read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["https://h/blob?<redacted>", "\\udcff"]
    assert file.stat().st_mode & 0o7777 == 0o640


def test_a_file_goes_on_where_it_was(file: Path) -> None:
    """After a restart of the agent."""
    file.parent.mkdir()
    file.write_text("old\n")
    said("new")

    assert file.read_text().startswith("old\n")
    assert file.read_text().endswith("new\n")


def test_a_file_that_was_large_already_makes_room(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is started again and again does not fill the disk."""
    monkeypatch.setattr(log, "LARGEST", 1000)
    file.parent.mkdir()
    file.write_text("x" * 1000)
    said("new")
    said("newer")

    assert (file.with_name("current.1").read_text()[:2], len(file.read_text().splitlines())) == ("xx", 1)


def test_a_large_file_makes_room(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them there are, whatever is said."""
    monkeypatch.setattr(log, "LARGEST", 1000)
    file.parent.mkdir()
    for number in range(100):
        said(f"line {number}")

    assert sorted(path.name for path in file.parent.iterdir()) == ["current", "current.1"]
    assert all(path.stat().st_size <= 1000 for path in file.parent.iterdir())
    numbers = [int(line.rsplit(" ", 1)[1]) for path in ("current.1", "current") for line in _lines(file, path)]
    assert numbers == list(range(numbers[0], 100))


@pytest.mark.parametrize("obstacle", ["link", "directory", "full"])
def test_a_file_that_cannot_be_written_stops_nobody(file: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it lead root elsewhere."""
    file.parent.mkdir()
    victim = file.parent / "victim"
    victim.touch()
    if obstacle == "directory":
        file.mkdir()
    elif obstacle == "link":
        file.symlink_to(victim)
    else:
        monkeypatch.setattr(os, "write", _no_space)
    said("something")
    logging.getLogger("part").info("%d", "no number")

    assert victim.read_text() == ""


def _no_space(fd: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def _lines(file: Path, name: str) -> list[str]:
    return file.with_name(name).read_text().splitlines()


def test_a_stderr_that_nobody_reads_blocks_nobody_and_drops_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr("sys.stderr", os.fdopen(writing, "w"))
    monkeypatch.setattr(log, "MAX_WAITING", 10)
    monkeypatch.setattr(log, "FLUSH_TIMEOUT_S", 0.01)
    log.setup(form="text")

    for number in range(3000):
        logging.getLogger("part").info("line %d %s", number, "x" * 100)
    content = b""
    while b"dropped" not in content:
        content += os.read(reading, 1 << 16)
        logging.getLogger("part").info("one more")

    assert b"lines before this one were dropped" in content
    logging.getLogger().handlers[0].close()
    os.close(reading)
