"""Tests the agent's log: redaction of secrets, escaping, rotation, and slow readers of stderr."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core import log
from agent_shim.core.errors import HostError


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:], root.level = before


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Return a function that sets up logging to a file instead of stderr and returns the file's path."""
    with (tmp_path / "stderr").open("w") as stream:

        def begin(**options: Any) -> Path:
            monkeypatch.setattr("sys.stderr", stream)
            log.setup(**options)
            return tmp_path / "stderr"

        yield begin


@pytest.mark.attack("a reader finds secrets in the log")
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
def test_log_redacts_secrets(text: str, expected: str) -> None:
    assert log.redacted(text) == expected


@pytest.mark.parametrize("form", ["json", "text"])
def test_log_line_has_level_logger_and_message_in_both_formats(form: str, setup: Callable[..., Path]) -> None:
    stderr = setup(form=form)

    logging.getLogger("part").warning("url is %s", "nats://a:b@c")
    logging.getLogger("part").debug("not seen")

    line = stderr.read_text().strip()
    assert "a:b" not in line
    if form == "json":
        document = json.loads(line)
        assert (document["level"], document["logger"]) == ("warning", "part")
        assert document["message"] == "url is nats://<redacted>@c"
    else:
        assert line.endswith("WARNING part: url is nats://<redacted>@c")


@pytest.mark.parametrize("form", ["json", "text"])
def test_extra_fields_are_logged_in_both_formats(form: str, setup: Callable[..., Path]) -> None:
    stderr = setup(form=form)

    members = {"method": "a\nb", "seconds": 0.5, "error": "GET https://h/b?sig=abc failed"}
    logging.getLogger("part").info("request", extra={"members": members})

    line = stderr.read_text().removesuffix("\n")
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


@pytest.mark.attack("text from a job forges lines in the agent's log, in alerts or in an archive's remarks")
@pytest.mark.parametrize("form", ["json", "text"])
def test_log_escapes_line_breaks_and_terminal_escape_sequences(form: str, setup: Callable[..., Path]) -> None:
    stderr = setup(form=form)

    hostile = "a\n2026-01-01 ERROR forged\r\x1b[2J\x9b2J\u2028b\x85c"
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("part").exception("unknown method %s", hostile, extra={"members": {"method": hostile}})

    text = stderr.read_text()
    assert not set("\x1b\x9b\r\x85\u2028") & set(text)
    assert [line for line in text.splitlines() if line.startswith("2026-01-01")] == []
    if form == "json":
        assert json.loads(text)["method"] == hostile
    else:
        assert all(line.startswith("  | ") for line in text.splitlines()[1:])


@pytest.mark.attack("a reader finds arguments, values or signed URLs in an audit record or an error")
@pytest.mark.parametrize("form", ["json", "text"])
def test_traceback_shows_the_code_location_but_no_untrusted_text(form: str, setup: Callable[..., Path]) -> None:
    """Exceptions raised by Python or a library may quote the invalid input, which can contain secrets."""
    stderr = setup(form=form)

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

    text = stderr.read_text()
    assert "test_log.py" in text
    for told in ("ValueError", "KeyError", "ExceptionGroup", "OSError [Errno 28]", "HostError: cannot write /a"):
        assert told in text
    assert secret not in text


def log_message(text: str) -> None:
    logging.getLogger("part").info("%s", text)


@pytest.fixture
def file(tmp_path: Path, setup: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up logging to the file that ``bosh logs --agent`` fetches. Return the file's path."""
    monkeypatch.setattr(log, "LARGEST", 1000)
    setup(form="text", file=tmp_path / "log" / "current")
    return tmp_path / "log" / "current"


def test_log_file_contains_redacted_and_escaped_lines_once_its_directory_exists(file: Path) -> None:
    log_message("too early")
    file.parent.mkdir()
    log_message("https://h/blob?sig=abc")
    log_message("\udcff")

    lines = file.read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["https://h/blob?<redacted>", "\\udcff"]
    assert file.stat().st_mode & 0o7777 == 0o640


def test_large_log_file_is_rotated_to_a_single_older_file(file: Path) -> None:
    file.parent.mkdir()
    for number in range(100):
        log_message(f"line {number}")

    assert sorted(path.name for path in file.parent.iterdir()) == ["current", "current.1"]
    assert all(path.stat().st_size <= 1000 for path in file.parent.iterdir())
    numbers = [int(line.rsplit(" ", 1)[1]) for path in ("current.1", "current") for line in _lines(file, path)]
    assert numbers == list(range(numbers[0], 100))


@pytest.mark.parametrize("obstacle", ["link", "directory", "full"])
def test_unwritable_log_file_does_not_stop_logging(file: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A symlink at the file's path is not followed, because root would write to its target."""
    file.parent.mkdir()
    victim = file.parent / "victim"
    victim.touch()
    if obstacle == "directory":
        file.mkdir()
    elif obstacle == "link":
        file.symlink_to(victim)
    else:
        monkeypatch.setattr(os, "write", _no_space)
    log_message("something")
    logging.getLogger("part").info("%d", "no number")

    assert victim.read_text() == ""


def _no_space(fd: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def _lines(file: Path, name: str) -> list[str]:
    return file.with_name(name).read_text().splitlines()


async def test_slow_stderr_reader_does_not_block_logging_and_dropped_lines_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    file = tmp_path / "current"
    monkeypatch.setattr(log, "MAX_WAITING_BYTES", 1 << 16)
    with os.fdopen(reading, "rb", buffering=0) as pipe, os.fdopen(writing, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        log.setup(form="text", file=file)
        for number in range(3000):
            log_message(f"line {number} {'x' * 100}")
        await asyncio.sleep(0)
        assert sum("x" * 100 in line for line in file.read_text().splitlines()) == 3000
        content = b""
        while b"dropped" not in content:
            content += await asyncio.to_thread(pipe.read, 1 << 16)

    lines = content.decode().splitlines()
    [dropped] = [int(line.split(": ")[1].split()[0]) for line in lines if "dropped" in line]
    assert len(lines) - 1 + dropped == 3000
    assert [line.split()[3] for line in lines[:2]] == ["line", "line"]


def test_long_log_line_is_written_whole(setup: Callable[..., Path]) -> None:
    stderr = setup(form="text")
    log_message("x" * 100_000)
    log_message("y")

    assert [line[-1] for line in stderr.read_text().splitlines()] == ["x", "y"]
    assert len(stderr.read_text()) > 100_000


def test_logging_continues_after_stderr_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        log.setup(form="text", file=tmp_path / "current")
        log_message("one")
        log_message("two")

    assert len((tmp_path / "current").read_text().splitlines()) == 2
