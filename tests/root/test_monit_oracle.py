"""Tests that our parser accepts the same files as the Linux distribution's monit, which is newer than version 5.2.5
on stemcells.

The test files contain only syntax that both versions treat in the same way.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_shim.core.errors import ConfigError
from agent_shim.supervisor.monit import parser
from tests.support import monit_render

pytestmark = pytest.mark.root

FILES = 300
SEED = 525

OPTIONS = (
    'start program "/bin/true start"',
    "start program = \"/bin/sh -c 'sleep 1; exit 0'\" as uid root and gid root with timeout 60 seconds",
    "start /bin/true with timeout 5 seconds",
    'stop program "/bin/true stop" as uid 0',
    "stop program '/bin/true'",
    "group vcap",
    'group "other"',
    "mode passive",
    "every 3 cycles",
    "alert a@b",
    "alert a@b only on { timeout, pid } with reminder on 10 cycles",
    "noalert a@b",
    "depends on first",
    "depends on first, First",
    "if 3 restarts within 5 cycles then timeout",
    "if 1 restart within 2 cycles then exec '/bin/true'",
)
"""Statements that are valid in almost every kind of check."""

TESTS = {
    "process": (
        "does not exist",
        "cpu usage > 80%",
        "totalcpu > 80 percent",
        "mem > 100.5 mb",
        "totalmem is greater than 11 %",
        "children gt 5",
        "changed pid",
        "changed ppid",
        "failed port 80",
        "failed host 127.0.0.1 port 80 type tcp",
        "failed host 'localhost' port 80 protocol http and request '/a b' with timeout 3 seconds",
        "failed unixsocket /tmp/s with timeout 5 seconds",
        'failed port 80 send "a\\n" expect "^b"',
        "failed port 80 protocol mysql",
        "failed port 53 type udp protocol dns",
        "failed url http://localhost:8080/a?b=c and content == 'ok' with timeout 3 seconds",
        "loadavg(5min) > 2.5",
    ),
    "file": (
        "size > 2 GB",
        "changed size",
        "changed checksum",
        "changed timestamp",
        "timestamp > 2 hours",
        "failed permission 644",
        "failed uid root",
        "failed gid 0",
        "match '^error'",
        "not match 'fine'",
        "changed sha1 checksum",
        "failed checksum expect d41d8cd98f00b204e9800998ecf8427e",
    ),
    "filesystem": (
        "SPACE usage > 80%",
        "space > 1.5 gb",
        "inode > 90%",
        "inodes > 500",
        "failed permission 0755",
        "changed fsflags",
    ),
    "directory": ("changed timestamp", "timestamp > 3 days", "failed permission 755", "failed uid 0"),
    "fifo": ("changed timestamp", "failed gid 0"),
    "host": (
        "failed port 80",
        "failed icmp type echo count 3 with timeout 5 seconds",
        "failed url http://localhost/ with timeout 3 seconds",
    ),
    "system": ("loadavg (15min) > 2", "cpu usage (user) > 70%", "memory usage > 75%", "swap > 100 mb"),
}
HEADS = {
    "process": (
        "process {} with pidfile /tmp/p",
        "process {} matching 'a|b'",
        "process {} path '/tmp/p q'",
        "{} with pidfile /p",
    ),
    "file": ("file {} with path /etc/passwd",),
    "filesystem": ("device {} with path /", "filesystem {} path '/'"),
    "directory": ("directory {} path /tmp",),
    "fifo": ("fifo {} path /tmp/fifo",),
    "host": ("host {} with address 127.0.0.1",),
    "system": ("system {}",),
}
RATES = ("", "", "", " for 3 cycles", " 2 times within 3 cycles", " for 64 cycles", " 2 3 cycles")
ACTIONS = ("alert", "restart", "start", "stop", "unmonitor", "exec \"/bin/true 'a b'\" as uid root", "exec /bin/true")
ENDS = ("", "", "", " else if succeeded then alert", " else if recovered for 2 cycles then exec '/bin/true'")
MISTAKES = (
    "start program '/bin/true' with timeout 5 seconds as uid root",
    "start program '/bin/true' with timeout 5",
    "start program '/bin/true' with timeout 5 minutes",
    "start program",
    "group",
    "group 'a",
    "mode fast",
    "every cycles",
    "alert a",
    "depends on first second",
    "depends on nobody",
    "depends on itself",
    "if not exist for 65 cycles then restart",
    "if not exist for 0 cycles then restart",
    "if not exist 3 times within 2 cycles then restart",
    "if not exist for 3 then restart",
    "if not exist restart",
    "if not exist then reboot",
    "if 5 restarts within 3 cycles then alert",
    "if changed colour then alert",
    "if failed port http then alert",
    "if totalmem > 500Mb then alert",
    "if cpu > then alert",
    "if size > 5 then alert",
    "if failed icmp type echo then alert",
    "if failed url ftp://localhost/ then alert",
    "if swap > 5 % then alert",
    "if changed timestamp then alert",
    "check process first with pidfile /p",
    "check process /a with pidfile /p",
    "check process b with pidfile p",
    "check host c with address localhost",
    "check nothing",
    "{",
)
"""Statements that both parsers must reject. Some refer to the check that contains them. Its name is ``itself``."""

BLANKS = ("\n", "\n  ", " ", "\n\n", "\t", " ; ", " # a comment\n", "\r\n")


def statements(random: random.Random) -> Iterator[str]:
    """Generate the statements of a random file. One in three files has an error."""
    yield "check process first with pidfile /tmp/first"
    for number in range(random.randrange(3)):
        kind = random.choice(sorted(HEADS))
        yield f"check {random.choice(HEADS[kind])}".format(f"name-{number}")
        # Do not set a mode in a system check, because newer versions of monit accept it but 5.2.5 does not.
        options = [option for option in OPTIONS if not (kind == "system" and option.startswith("mode"))]
        yield from random.sample(options, random.randrange(4))
        # A host check needs at least one test.
        for _ in range(random.randrange(4) or kind == "host"):
            test, rate, action, end = (random.choice(found) for found in (TESTS[kind], RATES, ACTIONS, ENDS))
            has_end = "changed" not in test and "match" not in test
            yield f"if {test}{rate} then {action}{end if has_end else ''}"
    if random.random() < 1 / 3:
        yield "check process itself with pidfile /tmp/itself"
        yield random.choice(MISTAKES)


def random_file(random: random.Random) -> str:
    """Return a random file with varying whitespace and comments between the statements.

    A list of dependencies is always followed by a line break, because it extends to the end of its line.
    """
    text = ""
    for statement in statements(random):
        text += statement + ("\n" if statement.startswith("depends") else random.choice(BLANKS))
    return text.rstrip(" ") + "\n"


def ours(text: str) -> str:
    """Return our parser's error for a file, or "" if it accepts the file."""
    try:
        return "\n".join(map(str, parser.problems([parser.parse(text, origin="ours")])))
    except ConfigError as exc:
        return str(exc)


@pytest.fixture
def theirs(tmp_path: Path) -> Callable[[str], str]:
    """Provide a function that returns monit's error for a file, or "" if monit accepts the file."""
    monit = shutil.which("monit")
    assert monit, "no monit to compare with: apt-get install monit"
    control = tmp_path / "monitrc"
    control.touch(mode=0o600)

    def check(text: str) -> str:
        control.write_text(
            f"set daemon 10\nset idfile {tmp_path}/id\nset statefile {tmp_path}/state\n{text}", newline=""
        )
        done = subprocess.run([monit, "-t", "-c", control], capture_output=True, text=True, timeout=30)
        return done.stderr + done.stdout if done.returncode else ""

    return check


def test_parser_rejects_the_same_files_as_monit(theirs: Callable[[str], str]) -> None:
    numbers = random.Random(SEED)
    refused = 0
    for text in (random_file(numbers) for _ in range(FILES)):
        our, their = ours(text), theirs(text)
        assert bool(our) == bool(their), f"we: {our or 'fine'}\nmonit: {their or 'fine'}\n{text}"
        refused += bool(our)

    assert FILES / 5 < refused < FILES / 2


@pytest.mark.parametrize("mistake", MISTAKES)
def test_parser_and_monit_reject_each_invalid_file(mistake: str, theirs: Callable[[str], str]) -> None:
    text = f"check process first with pidfile /a\ncheck process itself with pidfile /b\n{mistake}\n"

    assert theirs(text)
    assert ours(text)


def test_rendered_monit_files_are_accepted_by_monit(theirs: Callable[[str], str]) -> None:
    numbers = random.Random(SEED)
    for text in (random_file(numbers) for _ in range(FILES // 3)):
        if not ours(text):
            rendered = monit_render.render(parser.parse(text, origin="ours"))
            assert not theirs(rendered), rendered
