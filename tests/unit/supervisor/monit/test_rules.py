"""Tests how rules are parsed: tests, rates, actions, recovery, and programs with their users."""

from __future__ import annotations

import pytest

from agent_shim.core.errors import ConfigError
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import (
    Action,
    Changed,
    Connection,
    Echo,
    Limit,
    Match,
    Missing,
    MonitProgram,
    PidChanged,
    Protocol,
    Rate,
    Restarts,
    Rule,
    Test,
    Unlike,
)
from agent_shim.supervisor.monit.rules import PLAIN_PROTOCOLS

HEADS = {
    "process": "check process a pidfile /p",
    "file": "check file a path /p",
    "filesystem": "check filesystem a path /p",
    "directory": "check directory a path /p",
    "host": "check host a address h if failed port 1 then alert",
    "system": "check system a",
}
ALERT = Action("alert")
IGNORE = Action("ignore")


def rule(text: str, kind: str = "process") -> Rule:
    """Parse a check that ends with ``text``, and return its last rule."""
    return parser.parse(f"{HEADS[kind]}\n{text}", origin="x").services[0].rules[-1]


def refusal(text: str, kind: str = "process") -> str:
    with pytest.raises(ConfigError) as refused:
        rule(text, kind)
    return str(refused.value).partition(": ")[2]


@pytest.mark.parametrize(
    ("unit", "bytes_"),
    [
        ("", 1),
        ("b", 1),
        ("byte", 1),
        ("kb", 2**10),
        ("kilobyte", 2**10),
        ("mb", 2**20),
        ("MegaByte", 2**20),
        ("GB", 2**30),
        ("gigabyte", 2**30),
    ],
)
def test_rule_size_units_are_parsed(unit: str, bytes_: int) -> None:
    assert rule(f"if mem > 3 {unit} then alert").test == Limit("memory", ">", 3 * bytes_)


@pytest.mark.parametrize(
    ("operator", "spellings"),
    [(">", "> gt greater"), ("<", "< lt less"), ("=", "= == eq equal"), ("!=", "!= ne notequal changed")],
)
def test_all_spellings_of_rule_operators_are_parsed(operator: str, spellings: str) -> None:
    for spelling in spellings.split():
        assert rule(f"if children {spelling} 3 then alert").test == rule(f"if children {operator} 3 then alert").test


@pytest.mark.parametrize("protocol", PLAIN_PROTOCOLS)
def test_rule_protocols_without_options_are_parsed(protocol: str) -> None:
    test = rule(f"if failed port 1 protocol {protocol} then alert").test

    assert test == Connection("localhost", 1, protocol=Protocol(protocol), is_udp=protocol == "ntp3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("then alert", Rule(Missing(), ALERT)),
        ("for 3 cycles then restart", Rule(Missing(), Action("restart"), Rate(3, 3))),
        ("2 times within 64 cycles then stop", Rule(Missing(), Action("stop"), Rate(2, 64))),
        ("2 3 cycles then start", Rule(Missing(), Action("start"), Rate(2, 3))),
        ("then unmonitor else if succeeded then stop", Rule(Missing(), Action("unmonitor"), recovery=Action("stop"))),
        (
            "then alert else if passed for 2 cycles then exec '/x'",
            Rule(Missing(), ALERT, recovery=Action("exec", MonitProgram(("/x",))), recovery_rate=Rate(2, 2)),
        ),
        (
            'then exec "/x y" as uid u and gid g every 5 cycles',
            Rule(Missing(), Action("exec", MonitProgram(("/x", "y"), "u", "g"))),
        ),
    ],
)
def test_rule_rates_and_actions_are_parsed(text: str, expected: Rule) -> None:
    assert rule(f"if not exist {text}") == expected


def test_change_and_restart_rules_have_no_recovery() -> None:
    """These rules react to an event, so there is nothing to recover from when the event does not occur."""
    assert rule("if changed pid then stop") == Rule(PidChanged(), Action("stop"), recovery=IGNORE)
    assert rule("if 2 restarts 3 cycles then exec '/x'").recovery == IGNORE
    assert rule("if 2 restarts 3 cycles then timeout") == rule("if 2 restarts 3 cycles then unmonitor")
    assert rule("if 2 restarts 3 cycles then alert").test == Restarts(2, 3)


def test_rule_keywords_from_newer_monit_versions_are_ordinary_words() -> None:
    """Newer versions have ``exec ... repeat every N cycles``. In monit 5.2.5, ``repeat`` is an argument of the program,
    and ``every`` is an option of the check.
    """
    text = f'{HEADS["process"]} if not exist then exec "/x" repeat every 5 cycles'
    (check,) = parser.parse(text, origin="x").services

    assert check.every == 5
    assert check.rules[0].action.program == MonitProgram(("/x", "repeat"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("start '/x' with timeout 60 seconds as uid vcap", "found 'uid', expected 'uid' before 'timeout'"),
        ("start '/x' with timeout 60", "found the end of the file, expected 'seconds'"),
        ("start '/x' with timeout 1 minute", "found 'minute', expected 'seconds'"),
        ('start program ""', "found the end of the file, expected a program and its arguments"),
        ("start program /x 5", "found '5', expected an option of check process"),
        ("start '/x' uid /y", "found '/y', expected a user"),
        (f"start /x{' y' * 63}", "column 134: found 'y', expected a program of 63 words at most"),
        (
            "if then alert",
            "found 'then', expected a test of check process: 'not exist', a number of restarts, 'changed pid'",
        ),
        ("if changed colour then alert", "found 'colour', expected a test of check process: 'changed pid'"),
        ("if changed", "found the end of the file, expected a test of check process: 'changed pid'"),
        ("if not exist then exec '/x' timeout 5 seconds", "found 'timeout', expected an option of check process"),
        ("if not exist for 65 cycles then alert", "found '65', expected a number of cycles from 1 to 64"),
        ("if not exist for 0 cycles then alert", "found '0', expected a number of cycles from 1 to 64"),
        ("if not exist 3 times within 2 cycles then alert", "found '3', expected a number of times from 1 to 2"),
        ("if not exist for 3 then alert", "found 'then', expected 'cycles'"),
        ("if not exist alert", "found 'alert', expected a rate or 'then'"),
        (
            "if not exist then timeout",
            "found 'timeout', expected an action (alert, restart, start, stop, unmonitor or exec)",
        ),
        ("if not exist then alert else if passed alert", "found 'alert', expected a rate or 'then'"),
        ("if not exist then alert else alert", "found 'alert', expected 'if'"),
        (
            "if not exist then alert else if failed then alert",
            "found 'failed', expected 'succeeded', 'passed' or 'recovered'",
        ),
        ("if 3 restarts within 2 cycles then alert", "found '3', expected a number of restarts from 1 to 2"),
        ("if 0 restarts within 0 cycles then alert", "found '0', expected cycles above 0"),
        ("if 1 restart 2 cycles for 2 cycles then alert", "found '2', expected 'then'"),
        (
            "if totalmem > 500Mb then alert",
            "found '500Mb', expected a number, a blank and a unit, like '500 mb'",
        ),
        ("if totalmem > 1.5 % then alert", "found '%', expected a rate or 'then'"),
        ("if cpu > 5 then alert", "found 'then', expected '%'"),
        ("if failed port 80 timeout 5 seconds protocol http then alert", "found 'protocol', expected a rate or 'then'"),
        (
            "if failed port 80 type tcpssl then alert",
            "found 'tcpssl', expected 'tcp' or 'udp' (monit on a BOSH machine has no TLS)",
        ),
        ("if failed port 80 protocol https then alert", "found 'https', expected a protocol (apache-status, clamav,"),
        ("if failed port 80 protocol http request x then alert", "found 'x', expected a path, beginning with '/'"),
        (
            "if failed port 80 expect '[a' then alert",
            "found ''[a'', expected a regular expression (Unmatched [, [^, [:, [., or [=)",
        ),
        (f"if failed port {'1' * 37} then alert", "expected a port of 36 digits at most"),
        (f"if failed url http://h:{'1' * 5000}/ then alert", "expected a port of 36 digits at most"),
        (f"if memory > {'9' * 400}.0 then alert", "expected a number, a blank and a unit, like '500 mb' below 1e+18"),
    ],
)
def test_invalid_rule_is_rejected(text: str, expected: str) -> None:
    assert expected in refusal(text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("process", "if failed port 1 protocol radius secret s then alert"),
        ("process", "if failed port 1 protocol sip target a@b maxforward 6 then alert"),
        ("process", "if failed port 1 protocol apache-status loglimit > 10 % or dnslimit < 2 % then alert"),
        ("file", "if match /patterns for 3 cycles then alert"),
        ("file", "if not match /patterns then alert"),
        ("file", "ignore match /patterns"),
    ],
)
def test_unsupported_rules_are_listed_as_ignored(kind: str, text: str) -> None:
    """An unsupported rule is parsed to its end so that the options after it are found."""
    (check,) = (file := parser.parse(f"{HEADS[kind]} {text} group b", origin="x")).services

    assert (check.rules, check.groups) == ((), ("b",))
    assert file.ignored[-1].statement.split()[:2] == text.split()[:2]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("process", "does not exist", Missing()),
        ("process", "changed pid", PidChanged()),
        ("process", "cpu usage > 80%", Limit("cpu", ">", 80, percent=True)),
        ("process", "totalcpu is greater than 80 percent", Limit("totalcpu", ">", 80, percent=True)),
        ("process", "mem 500 mb", Limit("memory", "=", 500 * 2**20)),
        ("process", "memory lt 500", Limit("memory", "<", 500)),
        ("process", "totalmem >  11 %", Limit("totalmemory", ">", 11, percent=True)),
        ("process", "totalmem changed 1.5 kb", Limit("totalmemory", "!=", 1536)),
        ("process", "children != 4", Limit("children", "!=", 4)),
        ("process", "children ge 2", None),
        ("process", "cpu > 5 % mem > 6 % children > 7", Limit("children", ">", 7)),
        ("process", "failed port 80", Connection("localhost", 80)),
        (
            "process",
            "failed host 10.0.0.1 port 80 type tcp with timeout 9 seconds",
            Connection("10.0.0.1", 80, timeout=9),
        ),
        ("process", "failed unixsocket /s", Connection(unixsocket="/s")),
        ("process", "failed unix '/s' protocol mysql", Connection(unixsocket="/s", protocol=Protocol("mysql"))),
        ("process", "failed port 1 proto http", Connection("localhost", 1, protocol=Protocol("http"))),
        (
            "process",
            "failed port 1 protocol HTTP and request '/a?b=c d'",
            Connection("localhost", 1, protocol=Protocol("http", "/a?b=c d")),
        ),
        (
            "process",
            'failed port 1 protocol http request "/" hostheader "h"',
            Connection("localhost", 1, protocol=Protocol("http", "/", "h")),
        ),
        (
            "process",
            'failed port 1 send "a\\n" expect "^b" send "/c\\0x00"',
            None,
        ),
        (
            "process",
            'failed port 1 send "a\\n" expect "^b" send "c\\0x00"',
            Connection(
                "localhost",
                1,
                protocol=Protocol("generic", dialogue=(("send", "a\n"), ("expect", "^b"), ("send", "c\\0x00"))),
            ),
        ),
        ("filesystem", "SPACE usage > 80%", Limit("space", ">", 80, percent=True)),
        ("filesystem", "space > 1.5 gb", Limit("space", ">", 1.5 * 2**30)),
        ("filesystem", "inodes > 500", Limit("inode", ">", 500)),
        ("filesystem", "inode > 90%", Limit("inode", ">", 90, percent=True)),
        ("process", "space > 5 %", None),
        ("filesystem", "cpu > 5 %", None),
        ("file", "size > 2 GB", Limit("size", ">", 2 << 30)),
        ("file", "size = 5", Limit("size", "=", 5)),
        ("file", "timestamp > 5 minutes", Limit("timestamp", ">", 300)),
        ("directory", "timestamp lt 2 days", Limit("timestamp", "<", 172800)),
        ("file", "changed timestamp", Changed("timestamp")),
        ("file", "changed size", Changed("size")),
        ("file", "changed checksum", Changed("checksum")),
        ("file", "changed sha1 checksum", Changed("checksum", "sha1")),
        ("file", "failed checksum", Unlike("checksum")),
        ("file", f"failed checksum and expect the sum {'AB' * 16}", Unlike("checksum", "ab" * 16)),
        ("file", f"failed sha1 checksum expect '{'a:' * 40}'", Unlike("checksum", "a" * 40, "sha1")),
        ("directory", "failed permission 0755", Unlike("permission", "755")),
        ("filesystem", "failed perm 1777", Unlike("permission", "1777")),
        ("file", "failed uid 'vcap'", Unlike("uid", "vcap")),
        ("file", "failed gid 0", Unlike("gid", "0")),
        ("file", "match '^error'", Match("^error")),
        ("file", "not match '^error'", Match("^error", is_negated=True)),
        ("filesystem", "changed fsflags", Changed("fsflag")),
        ("process", "changed ppid", Changed("ppid")),
        ("process", "loadavg > 5", Limit("loadavg1", ">", 5)),
        ("process", "loadavg(5min) > 2.5", Limit("loadavg5", ">", 2.5)),
        ("system", "loadavg ( 15 m ) > 2", Limit("loadavg15", ">", 2)),
        ("system", "cpu usage (user) > 70%", Limit("cpu user", ">", 70, percent=True)),
        ("system", "cpu (sys) > 70%", Limit("cpu system", ">", 70, percent=True)),
        ("system", "cpu() > 70%", Limit("cpu user", ">", 70, percent=True)),
        ("system", "cpu (wa) > 70%", Limit("cpu wait", ">", 70, percent=True)),
        ("system", "swap usage > 5 mb", Limit("swap", ">", 5 << 20)),
        ("system", "memory > 75 % loadavg > 3", Limit("loadavg1", ">", 3)),
        ("host", "failed port 80", Connection("h", 80)),
        ("host", "failed icmp type echo", Echo()),
        ("host", "failed icmp type echo count 5 with timeout 15 seconds", Echo(5, 15)),
        ("process", "failed port 53 type udp protocol dns", Connection("localhost", 53, "", Protocol("dns"), 5, True)),
        ("process", "failed port 123 protocol ntp3", Connection("localhost", 123, "", Protocol("ntp3"), 5, True)),
        (
            "process",
            f"failed port 1 protocol http request '/a b' checksum {'a' * 32} hostheader 'x'",
            Connection("localhost", 1, "", Protocol("http", "/a b", "x", "a" * 32)),
        ),
        ("process", "failed url http://h ", Connection("h", 80, "", Protocol("http", "/"))),
        (
            "host",
            "failed url http://u:p@a.b:81/c?d=e#f and content != '^ok' timeout 1 second",
            Connection("a.b", 81, "", Protocol("http", "/c?d=e", content="^ok", is_negated=True, credentials="u:p"), 1),
        ),
        ("process", "(failed url http://h/x)", Connection("h", 80, "", Protocol("http", "/x)"))),
        ("process", "(failed url http://h/x )", Connection("h", 80, "", Protocol("http", "/x"))),
        ("process", "size > 5", None),
        ("process", "swap > 5 mb", None),
        ("process", "cpu (user) > 5 %", None),
        ("system", "cpu > 5 %", None),
        ("system", "not exist", None),
        ("filesystem", "timestamp > 5", None),
        ("directory", "size > 5", None),
        ("host", "failed unixsocket /s", None),
    ],
)
def test_parser_accepts_only_rules_for_the_kind_of_check(kind: str, text: str, expected: Test | None) -> None:
    if expected is None:
        refusal(f"if {text} then alert", kind)
    else:
        assert rule(f"if {text} then alert", kind).test == expected


def test_change_rule_with_a_recovery_is_rejected() -> None:
    for kind, test in (("file", "changed size"), ("file", "match 'a'"), ("process", "changed ppid")):
        assert rule(f"if {test} then alert", kind).recovery == IGNORE
        assert "found 'else'" in refusal(f"if {test} then alert else if passed then alert", kind)


def test_ignored_match_patterns_belong_to_the_check() -> None:
    text = "check file a path /p if match 'a' then alert ignore match '^#' ignore not match 'x'"

    (check,) = parser.parse(text, origin="x").services

    assert check.passed_over == (Match("^#"), Match("x", is_negated=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if size > 5", "found the end of the file, expected a rate or 'then'"),
        ("if size > 5 alert\nset daemon 5", "found 'alert', expected a rate or 'then'"),
        ("if size > 5 then", "found the end of the file, expected an action"),
        ("if size > 5.5 mb then alert", "found '5.5', expected a number"),
        ("if match 'a then alert", "found a quote that is not closed, expected a regular expression or a path"),
        ("if match /a", "found the end of the file, expected a rate or 'then'"),
        ("ignore exist", "found 'exist', expected 'match' or 'not match' after 'ignore'"),
        ("ignore match 5", "found '5', expected a regular expression or a path"),
        ("if failed permission 800 then alert", "found '800', expected an octal number from 0 to 7777"),
        ("if failed permission 10000 then alert", "found '10000', expected an octal number from 0 to 7777"),
        ("if failed checksum expect abc then alert", "found 'abc', expected a checksum of md5 or sha1"),
        (f"if failed sha1 checksum expect {'a' * 32} then alert", "expected a checksum of sha1"),
        ("if changed md5 then alert", "found 'then', expected 'checksum'"),
    ],
)
def test_invalid_file_rule_is_rejected(text: str, expected: str) -> None:
    assert expected in refusal(text, "file")


@pytest.mark.parametrize("url", ["https://h/ ", "ftp://h/ ", "http://h:x/ ", "http:///x "])
def test_invalid_urls_in_rules_are_rejected(url: str) -> None:
    """monit accepts only plain HTTP URLs. A URL ends at the next space."""
    assert "expected a URL like http://HOST:PORT/PATH" in refusal(f"if failed url {url}then alert")
