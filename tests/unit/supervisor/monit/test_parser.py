"""Tests parsing monit files: checks with their options, errors, and dependencies between files."""

from __future__ import annotations

import re

import pytest

from agent_shim.core.errors import ConfigError
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import (
    Action,
    Check,
    Connection,
    Ignored,
    Limit,
    Missing,
    MonitFile,
    MonitProgram,
    Rate,
    Restarts,
    Rule,
)


def parse(text: str, origin: str = "web/monit") -> MonitFile:
    return parser.parse(text, origin=origin)


def refusal(text: str) -> str:
    """Return the error for ``text`` without the file name."""
    with pytest.raises(ConfigError) as refused:
        parse(text)
    prefix, _, rest = str(refused.value).partition(": ")
    assert prefix == "cannot read web/monit"
    return rest


WORKER = """
# a complete check of a process
check process worker
  with pidfile /var/vcap/sys/run/worker/worker.pid
  start program "/var/vcap/jobs/worker/bin/ctl start 'a b'" as uid vcap and gid 100 with timeout 60 seconds
  stop program "/var/vcap/jobs/worker/bin/ctl stop"
  depends on db, Cache
  group vcap
  group other
  mode manual every 3 cycles
  if does not exist for 2 cycles then restart
  if totalmem > 1.5 Gb for 3 times within 5 cycles then exec "/bin/bash -c 'kill -9 1'" as uid root
    else if recovered 2 cycles then start
  if 3 restarts within 5 cycles then timeout
  alert ops@example.com only on { timeout } with reminder on 10 cycles
"""


def test_parser_reads_every_part_of_a_check() -> None:
    file = parse(WORKER)

    assert file == MonitFile(
        services=(
            Check(
                kind="process",
                name="worker",
                pidfile="/var/vcap/sys/run/worker/worker.pid",
                start=MonitProgram(("/var/vcap/jobs/worker/bin/ctl", "start", "a b"), "vcap", "100", 60),
                stop=MonitProgram(("/var/vcap/jobs/worker/bin/ctl", "stop")),
                depends=("db", "Cache"),
                groups=("vcap", "other"),
                mode="manual",
                every=3,
                rules=(
                    Rule(Missing(), Action("restart"), Rate(2, 2)),
                    Rule(
                        Limit("totalmemory", ">", 1.5 * 2**30),
                        Action("exec", MonitProgram(("/bin/bash", "-c", "kill -9 1"), "root")),
                        Rate(3, 5),
                        Action("start"),
                        Rate(2, 2),
                    ),
                    Rule(Restarts(3, 5), Action("unmonitor"), recovery=Action("ignore")),
                ),
            ),
        ),
        ignored=(Ignored("alert ops@example.com { timeout } reminder 10 cycles", "worker"),),
    )


def test_parser_keeps_line_numbers() -> None:
    check = parse(WORKER).services[0]

    assert (check.line, [rule.line for rule in check.rules]) == (3, [11, 12, 14])
    assert parse(WORKER).ignored[0].line == 15
    assert parse(WORKER.replace("\n", "\n\n")) == parse(WORKER)


@pytest.mark.parametrize("text", ["", "\n \t\r\n", "# nothing here\n"])
def test_empty_monit_file_is_valid(text: str) -> None:
    """A job without processes has an empty monit file."""
    assert parse(text) == MonitFile()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("check a pidfile /p", Check("process", "a", pidfile="/p")),
        ('check process "a" with path "/p q"', Check("process", "a", pidfile="/p q")),
        ("check process a matching '^/x.*[0-9]$'", Check("process", "a", matching="^/x.*[0-9]$")),
        ("check process a matching /bin/x|y", Check("process", "a", matching="/bin/x|y")),
        ("check file a with path /p", Check("file", "a", path="/p")),
        ("check device a with path /p", Check("filesystem", "a", path="/p")),
        ("check filesystem a path '/p'", Check("filesystem", "a", path="/p")),
        ("check directory a path /p", Check("directory", "a", path="/p")),
        ("check fifo a path /p", Check("fifo", "a", path="/p")),
        ("check status a path /p", Check("status", "a", path="/p")),
        ("check system a", Check("system", "a")),
    ],
)
def test_parser_reads_all_kinds_of_checks(text: str, expected: Check) -> None:
    assert parse(text).services == (expected,)


def test_connection_tests_default_to_the_address_of_the_host_check() -> None:
    (check,) = parse('check host a with address "10.0.0.1" if failed port 80 then alert').services

    assert (check.address, [rule.test for rule in check.rules]) == ("10.0.0.1", [Connection("10.0.0.1", 80)])


def test_last_start_program_in_a_check_is_used() -> None:
    (check,) = parse('check a pidfile /p start "/x" start "/y"').services

    assert check.start == MonitProgram(("/y",))


def test_parser_lists_ignored_statements_with_their_lines() -> None:
    file = parse('set  logfile\nsyslog\ncheck a pidfile /p\nnoalert x@y\ninclude  "/a b/*"\nalert x@z\nset daemon 5')

    assert file.ignored == (
        Ignored("set logfile syslog"),
        Ignored('include "/a b/*"'),
        Ignored("set daemon 5"),
        Ignored("noalert x@y", "a"),
        Ignored("alert x@z", "a"),
    )
    assert [statement.line for statement in file.ignored] == [1, 5, 7, 4, 6]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"processes": []}', "line 1 column 1: found '{', expected 'check' or 'set'"),
        ("\ufeffcheck a pidfile /p", "line 1 column 1: found '\ufeffcheck', expected 'check' or 'set'"),
        ("group vcap", "line 1 column 1: found 'group', expected 'check' or 'set'"),
        ("check", "line 1 column 1: found 'check', expected 'check' or 'set'"),
        ("check process", "line 1 column 14: found the end of the file, expected 'pidfile' or 'matching'"),
        (
            "check host a address b",
            "line 1 column 22: found 'b', expected a host name or address (in quotes: b is a keyword)",
        ),
        ("check process ", "line 1 column 15: found the end of the file, expected a name of one word"),
        ("check process 'a b' ", "line 1 column 15: found a quote that no single word follows, expected a name"),
        ("check a", "line 1 column 8: found the end of the file, expected 'pidfile' or 'matching'"),
        ("check a pidfile p", "line 1 column 17: found 'p', expected a path, beginning with '/'"),
        ("check a pidfile /p@q", "line 1 column 17: found '/p@q', expected a path, beginning with '/'"),
        ("check /a pidfile /p", "line 1 column 7: found '/a', expected a name that does not begin with '/'"),
        (
            "check program a path /p",
            "line 1 column 15: found 'a', expected 'pidfile' or 'matching' (monit 5.2.5 has no 'check program')",
        ),
        (
            "check a pidfile /p\ncheck A pidfile /q",
            "line 2 column 7: found 'A', expected another name: 'a' is already defined in line 1",
        ),
        (
            "check a matching '(x'",
            "line 1 column 18: found ''(x'', expected a regular expression (Unmatched ( or \\()",
        ),
        (
            "check a pidfile /p\n # end",
            "line 2 column 2: found a comment without a line end, expected an option of check process",
        ),
        (
            "check host a address h group c",
            "found the end of the file, expected 'if failed port' or 'if failed icmp' for the host a",
        ),
        (
            "check system a mode passive",
            "found 'mode', expected an option of check system, 'check', 'set' or the end of the file",
        ),
        ("check status a path /p mode passive", "found 'mode', expected an option of check status"),
        ("check status a path /p stop /x", "found 'stop', expected an option of check status"),
        ("check a pidfile /p group ", "found the end of the file, expected a name of one word"),
        ("check a pidfile /p depends on 'a'", "found ''a'', expected the name of a check, without quotes"),
        ("check a pidfile /p depends on b c", "found 'c', expected an option of check process"),
        ("check a pidfile /p mode slow", "found 'slow', expected 'active', 'passive' or 'manual'"),
        ("check a pidfile /p every 1 cycles", "column 26: found '1', expected a number of cycles above 1"),
        ("check a pidfile /p every 2", "found the end of the file, expected 'cycles'"),
        ("check a pidfile /p restart program '/x'", "found 'restart', expected an option of check process"),
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
        ("check a pidfile '/p\0'", "line 1 column 20: found a NUL byte, expected text"),
    ],
)
def test_invalid_monit_file_is_rejected(text: str, expected: str) -> None:
    assert expected in refusal(text)


def problems(*texts: str) -> list[str]:
    files = [parse(text, f"job{number}/monit") for number, text in enumerate(texts)]
    return [str(problem) for problem in parser.problems(files)]


def service(name: str, *depends: str) -> str:
    return f"check process {name} pidfile /p\n" + (f"depends on {', '.join(depends)}\n" if depends else "")


def test_monit_service_may_depend_on_a_service_in_another_file() -> None:
    assert problems(service("a", "B", "c"), service("b", "c") + service("C")) == []


def test_dependency_problems_across_monit_files_are_found() -> None:
    found = problems(service("a", "x"), service("b", "c") + service("A"), service("c", "d"), service("d", "b", "a"))

    assert found == [
        "job1/monit: line 3: 'A' is defined already in job0/monit line 1",
        "job0/monit: line 1: 'a' depends on 'x', which is not defined",
        "job1/monit: line 1: depends on itself: b -> c -> d -> b",
    ]


def test_every_dependency_cycle_is_found() -> None:
    found = problems(service("z", "a") + service("a", "a") + service("b", "c") + service("c", "b"))

    assert found == [
        "job0/monit: line 3: depends on itself: a -> a",
        "job0/monit: line 5: depends on itself: b -> c -> b",
    ]


def test_long_dependency_chains_are_accepted() -> None:
    """The chain is longer than Python's recursion limit."""
    chain = "".join(service(f"s{number}", f"s{number + 1}") for number in range(1100)) + service("s1100")

    assert problems(chain) == []
    assert len(problems(chain + service("t", "t"))) == 1


def test_converging_dependencies_are_checked_quickly() -> None:
    """Each service on the twelve levels depends on both services on the next level, so there are thousands of paths."""
    levels = "".join(
        service(f"{side}{level}", f"a{level + 1}", f"b{level + 1}") for side in "ab" for level in range(12)
    )

    assert problems(levels + service("a12") + service("b12")) == []


def test_parser_reports_all_errors_in_a_file_at_once() -> None:
    """Parsing resumes at the next statement that begins a line, because one error would otherwise cause others."""
    text = """check process web with pidfile run/web.pid
  start program "/bin/true"
  if totalmem > 5 GB for 2 cycles then start
    else if recovered then alert
  mode sometimes
  group vcap
check process web2 pidfile /b
  frequency 3
  every 1 cycles
  if failed host 127.0.0.1 port 80 then restart
check host c address 127.0.0.1
  if failed prot 80 then alert
"""
    with pytest.raises(ConfigError) as refused:
        parse(text, origin="monit")

    begin, *rest = str(refused.value).split("; ")
    places = [re.search(r"line \d+ column \d+: found .*?,", each) for each in (begin, *rest)]
    assert begin.startswith("cannot read monit: line 1 column 32: found 'run/web.pid', expected ")
    assert [place[0] for place in places if place] == [
        "line 1 column 32: found 'run/web.pid',",
        "line 5 column 8: found 'sometimes',",
        "line 8 column 3: found 'frequency',",
        "line 9 column 9: found '1',",
        "line 12 column 13: found 'prot',",
    ]


def test_parser_reports_no_errors_after_an_unclosed_quote() -> None:
    with pytest.raises(ConfigError) as refused:
        parse("check process a pidfile b\n  if changed pid then exec '/b\n  mode c\n", origin="monit")

    assert str(refused.value).count("found") == 2


@pytest.mark.parametrize("rest", ["\n  mode \0\n  mode c\n", "\n5 mode c\n"])
def test_parser_reports_one_error_per_line(rest: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(f"check process a pidfile b{rest}", origin="monit")

    assert str(refused.value).count("found") == 1


def test_parser_reports_at_most_twenty_errors() -> None:
    with pytest.raises(ConfigError, match="; line 21 column 8: found 'x', expected .*; and 4 more$"):
        parse("check process a pidfile /a\n" + "  mode x\n" * 24, origin="monit")


@pytest.mark.parametrize(
    "text",
    [
        "set daemon 10 start delay 60",
        'set mailserver a port 25 username u password "y" tlsv1 certmd5 d e username f@g timeout 5 second hostname h',
        "set mail-format { from: a@b reply-to: c@d subject: $EVENT\nmessage: x, y\n z }",
        "set httpd port 2812 address a allow f allow c : d readonly allow @ e allow /f allow md5 /g h i",
        "set limits { programOutput : 512 B }",
        "check a pidfile /p\nnoalert a@b",
        "check a pidfile /p\nalert a@b",
        "check a pidfile /p\nalert a@b not { timeout }",
        "check a pidfile /p\nalert a@b { uid } mail-format { message: x y } reminder 5",
    ],
)
def test_parser_keeps_ignored_statements_without_noise_words(text: str) -> None:
    (ignored,) = parse(f"{text}\n").ignored

    assert ignored.statement.replace("\n", " ") == text.removeprefix("check a pidfile /p\n").replace("\n", " ")
    (ignored,) = parse("SET\n daemon   10 with START\tdelay of 5").ignored
    assert ignored.statement == "SET daemon 10 START delay 5"  # Repeated spaces and noise words are dropped.
