"""``set`` and ``alert``: they have no effect; any words of a ``set`` are taken."""

from __future__ import annotations

import pytest

from agent_shim.core.errors import ConfigError
from agent_shim.supervisor.monit import parser

HEAD = "check a pidfile /p\n"
EVENTS = (
    "action checksum connection content data exec fsflag gid icmp instance invalid nonexist permission pid ppid"
    " resource size timeout timestamp uid"
).split(" ")


def statement(text: str) -> str:
    """Return the record of the only ignored statement."""
    (ignored,) = parser.parse(text, origin="x").ignored
    return ignored.statement


@pytest.mark.parametrize(
    "text",
    [
        "set daemon 10",
        "set daemon 10 start delay 60",
        "set logfile /a",
        "set logfile syslog",
        "set logfile syslog facility log_local3",
        "set eventqueue basedir /a",
        "set eventqueue basedir /a slots 5",
        "set eventqueue slots 5",
        "set idfile /a",
        "set statefile /a",
        "set pidfile /a",
        "set expectbuffer 10",
        "set expectbuffer 10 kb",
        "set init",
        "set fips",
        "set alert a@b",
        "set alert a@b not { action pid } mail-format { from: a@b } reminder 5 cycles",
        "set mailserver a",
        'set mailserver a port 25 username u password "y" tlsv1 certmd5 d e username f@g timeout 5 second hostname h',
        "set mailserver a sslv2 c sslv3 d sslauto",
        "set mail-format { from: a@b reply-to: c@d subject: $EVENT\nmessage: x, y\n z }",
        "set mmonit http : //a : b@c : 80/d",
        "set mmonit http : //a/ timeout 5 seconds register credentials http : //b/",
        "set httpd port 2812",
        "set httpd port 2812 address a allow f allow c : d readonly allow @ e allow /f allow md5 /g h i",
        "set httpd port 2812 ssl disable pemfile /a signature disable",
        "set httpd port 2812 disable ssl allowselfcertification enable signature",
        "set limits { programOutput : 512 B }",
        "set daemon start",
    ],
)
def test_set(text: str) -> None:
    """Every setting is accepted and kept as it stands."""
    assert statement(f"{text}\n") == text


@pytest.mark.parametrize(
    "text",
    [
        "noalert a@b",
        "alert a@b",
        "alert a@b { action pid }",
        "alert a@b not { timeout }",
        "alert a@b mail-format { subject: x }",
        f"alert a@b {{ {' '.join(EVENTS)} }}",
        "alert a@b { uid } mail-format { message: x y } reminder 5",
    ],
)
def test_alert(text: str) -> None:
    assert statement(f"{HEAD}{text}\n").replace("\n", " ") == text


def test_blanks_and_noise_are_not_kept() -> None:
    assert statement("SET\n daemon   10 with START\tdelay of 5") == "SET daemon 10 START delay 5"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("set", "found the end of the file, expected the words of a 'set'"),
        ("set set daemon 5", "found 'set', expected the words of a 'set'"),
        ("set check a pidfile /p", "found 'check', expected the words of a 'set'"),
        ("set idfile 'a", "found a quote that is not closed, expected the words of a 'set'"),
        ("check a pidfile /p alert a@b not", "found the end of the file, expected '{', events and '}'"),
        ("check a pidfile /p alert a@b { { pid }", "found '{', expected '{', events and '}'"),
        (
            "check a pidfile /p alert a@b mail-format { subject: a",
            "found the end of the file, expected '{', the parts of a mail and '}'",
        ),
        ("check a pidfile /p alert a", "found 'a', expected a mail address"),
    ],
)
def test_refusals(text: str, expected: str) -> None:
    """The error has the place, the actual and the expected text."""
    with pytest.raises(ConfigError) as refused:
        parser.parse(text, origin="x")

    assert expected in str(refused.value)
