"""Values as text: one spelling, and nothing of what they say is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import (
    ALERT,
    IGNORE,
    Action,
    Changed,
    Check,
    Checksum,
    Connection,
    Ignored,
    Kind,
    Limit,
    Match,
    Missing,
    MonitFile,
    Owner,
    Permission,
    Ping,
    Program,
    Protocol,
    Rate,
    Restarts,
    Rule,
    Test,
)
from agent_shim.supervisor.monit.rules import APACHE_LIMITS, PLAIN_PROTOCOLS, RESOURCES
from tests.support import monit_render

CANONICAL = """\
set logfile syslog
check process web with pidfile "/run/web.pid"
  start program "/bin/ctl start 'a b'" as uid vcap as gid 100 with timeout 60 seconds
  stop program "/bin/ctl stop"
  group vcap
  depends on db, cache
  mode passive
  every 2 cycles
  if does not exist for 3 cycles then restart
  if memory > 500 mb 2 times within 5 cycles then exec "/bin/x" else if succeeded then start
  if failed host "localhost" port 80 protocol http request "/" with timeout 9 seconds then alert
  if failed url http://h/a then alert
  alert a@b
check file log with path "/log"
  if size > 2 gb then alert
  if timestamp > 2 days then alert
  if not match "\\0x2fa" then alert
  ignore match "b"
"""


def test_one_spelling() -> None:
    """A rendered file stays the same when it is parsed and rendered again."""
    text = CANONICAL.replace("uid vcap", 'uid "vcap"')

    assert monit_render.render(parser.parse(text, origin="x")) == text


@pytest.mark.parametrize(
    ("word", "spelled"),
    [
        ("a", "/x a"),
        ("", "/x ''"),
        ("a b", "/x 'a b'"),
        ("it's", "/x it's"),
        ("'it's", r"/x '\0x27it\0x27s'"),
        ('"', r"/x '\0x22'"),
        ("\\n", "/x \\n"),
        ("\\ \n", r"/x '\\ \n'"),
        ("\r", r"/x '\r'"),
        ("\udcff ", r"/x '\0xff '"),
    ],
)
def test_arguments(word: str, spelled: str) -> None:
    """Any argument can be written."""
    file = MonitFile((Check("process", "a", pidfile="/p", start=Program(("/x", word))),))

    assert f'  start program "{spelled}"\n' in monit_render.render(file)
    assert parser.parse(monit_render.render(file), origin="x") == file


# --- any values ---------------------------------------------------------------------------------------------------

TEXT = st.text(
    st.one_of(
        st.sampled_from("/\\ '\"\n\t#@:{}%,"),
        st.characters(exclude_characters="\0", codec="utf-8"),
        st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    )
)
FILLED = TEXT.filter(bool)
PATH = TEXT.map(lambda text: f"/{text}")
NAME = FILLED.filter(lambda text: not text.startswith("/"))
BARE = st.text(
    st.characters(codec="utf-8", exclude_characters="@:{}\"';(),%!", exclude_categories=["Cc", "Zs", "Cs"]), min_size=1
)
OWNER = st.one_of(FILLED, st.integers(0, 99999).map(str))
NUMBER = st.integers(0, 10**17)
PORT = st.integers(0, 65535)
REGEX = st.sampled_from(["x", "^/a.*b$", "a|b", "", "'\"", "\\\\x"])
UNITS = st.sampled_from([1, 2**10, 2**20, 2**30])
REAL = st.floats(0, 10**9, allow_nan=False)
OPERATOR = st.sampled_from([">", "<", "=", "!="])
PROGRAM = st.builds(
    Program, st.lists(TEXT, min_size=1, max_size=5).map(tuple), st.just("") | OWNER, st.just("") | OWNER, NUMBER
)
EXEC = st.builds(Program, st.lists(TEXT, min_size=1, max_size=5).map(tuple), st.just("") | OWNER, st.just("") | OWNER)
ACTION = st.builds(Action, st.sampled_from(["alert", "restart", "start", "stop", "unmonitor"])) | st.builds(
    Action, st.just("exec"), EXEC
)
RATE = st.tuples(st.integers(1, 64), st.integers(1, 64)).map(lambda pair: Rate(min(pair), max(pair)))


def limit(metric: str) -> SearchStrategy[Limit]:
    """Figures as they can be written for a metric."""
    percent = st.builds(Limit, st.just(metric), OPERATOR, NUMBER, st.just(True))
    amount = st.builds(lambda number, unit: number * unit, NUMBER | REAL, UNITS)
    if metric in ("memory", "totalmemory", "swap", "space"):
        return percent | st.builds(Limit, st.just(metric), OPERATOR, amount)
    if metric in ("children", "inode"):
        return st.builds(Limit, st.just(metric), OPERATOR, NUMBER)
    if metric.startswith("loadavg"):
        return st.builds(Limit, st.just(metric), OPERATOR, NUMBER | REAL)
    if metric == "size":
        return st.builds(Limit, st.just(metric), OPERATOR, st.builds(lambda number, unit: number * unit, NUMBER, UNITS))
    if metric == "timestamp":
        periods = st.sampled_from([1, 60, 3600, 86400])
        return st.builds(
            Limit, st.just(metric), OPERATOR, st.builds(lambda number, unit: number * unit, NUMBER, periods)
        )
    return percent


def limits(kind: str) -> list[SearchStrategy[Test]]:
    return [limit(metric) for metric, kinds in RESOURCES.items() if kind in kinds]


DIALOGUE = st.lists(st.tuples(st.just("send"), TEXT) | st.tuples(st.just("expect"), REGEX), min_size=1, max_size=3).map(
    tuple
)
SUMS = st.sampled_from([("md5", "0123456789abcdef" * 2), ("sha1", "01234567" * 5)])
PROTOCOL = st.one_of(
    st.sampled_from(sorted(set(PLAIN_PROTOCOLS) - {"ntp3"})).map(Protocol),
    st.just(Protocol("http")),
    st.builds(Protocol, st.just("http"), PATH, st.just("") | SUMS.map(lambda found: found[1]), TEXT),
    st.builds(Protocol, st.just("sip"), target=TEXT, maxforward=st.integers(0, 255)),
    st.builds(Protocol, st.just("radius"), secret=TEXT),
    st.builds(
        Protocol,
        st.just("apache-status"),
        limits=st.lists(st.sampled_from(APACHE_LIMITS).flatmap(limit), min_size=1, max_size=3).map(tuple),
    ),
    st.builds(Protocol, st.just("generic"), dialogue=DIALOGUE),
)
TYPE = st.sampled_from(["tcp", "udp"])
PORT_TEST = st.builds(Connection, FILLED, PORT, st.just(""), TYPE, PROTOCOL, NUMBER)
URL_TEST = st.builds(
    lambda port, content, operator, timeout: Connection(
        "h",
        port,
        "",
        "tcp",
        Protocol("http", "/a?b", content=content, content_operator=operator if content else "="),
        timeout,
        f"http://u:p@h:{port}/a?b",
    ),
    PORT,
    REGEX,
    st.sampled_from(["=", "!="]),
    NUMBER,
)
SOCKET_TEST = st.builds(Connection, st.just(""), st.just(0), PATH, TYPE, PROTOCOL, NUMBER)
COUNT_TEST = st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)).map(lambda pair: Restarts(min(pair), max(pair)))
OWNER_TEST = st.builds(Owner, st.sampled_from(["uid", "gid"]), OWNER)
PATH_TESTS: list[SearchStrategy[Test]] = [st.builds(Permission, st.integers(0, 0o7777)), OWNER_TEST]
TIME_TESTS: list[SearchStrategy[Test]] = [limit("timestamp"), st.just(Changed("timestamp"))]
TESTS: dict[Kind, list[SearchStrategy[Test]]] = {
    "process": [
        *limits("process"),
        st.sampled_from([Changed("pid"), Changed("ppid")]),
        PORT_TEST,
        URL_TEST,
        SOCKET_TEST,
    ],
    "file": [
        *PATH_TESTS,
        *TIME_TESTS,
        limit("size"),
        st.sampled_from(
            [Changed("size"), Changed("checksum"), Changed("checksum", "md5"), Changed("checksum", "sha1")]
        ),
        st.sampled_from([Checksum(), Checksum("md5"), Checksum("sha1")]) | SUMS.map(lambda found: Checksum(*found)),
        st.builds(Match, REGEX, st.just(""), st.booleans()) | st.builds(Match, st.just(""), PATH, st.booleans()),
    ],
    "filesystem": [*PATH_TESTS, limit("space"), limit("inode"), st.just(Changed("fsflag"))],
    "directory": [*PATH_TESTS, *TIME_TESTS],
    "fifo": [*PATH_TESTS, *TIME_TESTS],
    "host": [PORT_TEST, URL_TEST, st.builds(Ping, NUMBER, NUMBER)],
    "system": limits("system"),
    "status": [],
}


@st.composite
def rules(draw: st.DrawFn, kind: Kind) -> Rule:
    common: list[SearchStrategy[Test]] = [COUNT_TEST] if kind == "system" else [COUNT_TEST, st.just(Missing())]
    test = draw(st.one_of(*common, *TESTS[kind]))
    if isinstance(test, Restarts):
        return Rule(test, draw(ACTION), recovery=IGNORE)
    if isinstance(test, Match) and draw(st.booleans()):
        return Rule(test, IGNORE, recovery=IGNORE)
    if isinstance(test, Changed | Match):
        return Rule(test, draw(ACTION), draw(RATE), IGNORE)
    return Rule(test, draw(ACTION), draw(RATE), draw(st.just(ALERT) | ACTION), draw(st.just(Rate()) | RATE))


@st.composite
def checks(draw: st.DrawFn) -> Check:
    kind = draw(st.sampled_from(sorted(TESTS)))
    found = draw(st.lists(rules(kind), max_size=4))
    if kind == "host":
        found.append(Rule(draw(PORT_TEST), ALERT))
    by_file = draw(st.booleans())
    has_mode = kind not in ("system", "status")
    return Check(
        kind=kind,
        name=draw(NAME),
        pidfile=draw(PATH) if kind == "process" and by_file else "",
        matching=draw(REGEX.filter(bool)) if kind == "process" and not by_file else "",
        path=draw(PATH) if kind not in ("process", "host", "system") else "",
        address=draw(TEXT) if kind == "host" else "",
        start=draw(st.none() | PROGRAM) if kind != "status" else None,
        stop=draw(st.none() | PROGRAM) if kind != "status" else None,
        groups=tuple(draw(st.lists(FILLED, max_size=2))),
        depends=tuple(draw(st.lists(BARE, max_size=3))),
        mode=draw(st.sampled_from(["active", "passive", "manual"])) if has_mode else "active",
        every=draw(st.integers(1, 1000)),
        rules=tuple(found),
    )


@st.composite
def files(draw: st.DrawFn) -> MonitFile:
    services = draw(st.lists(checks(), max_size=3, unique_by=lambda check: check.name.lower()))
    outside = draw(st.lists(st.sampled_from(["set daemon 5", "include '/a b'", "set alert a@b { uid }"]), max_size=2))
    alerts = [Ignored("noalert a@b", check.name) for check in services if draw(st.booleans())]
    return MonitFile(tuple(services), (*map(Ignored, outside), *alerts))


@given(files())
@settings(max_examples=30)
def test_any_value_comes_back(file: MonitFile) -> None:
    """Every value can be rendered and parsed again."""
    assert parser.parse(monit_render.render(file), origin="rendered") == file
