"""Tests that rendering a parsed monit file in its canonical form loses no information."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace

from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import (
    ALERT,
    CHANGES,
    IGNORE,
    Action,
    Changed,
    Check,
    Connection,
    Echo,
    Ignored,
    Kind,
    Limit,
    Match,
    Missing,
    MonitFile,
    MonitProgram,
    PidChanged,
    Protocol,
    Rate,
    Restarts,
    Rule,
    Test,
    Unlike,
)
from agent_shim.supervisor.monit.rules import PLAIN_PROTOCOLS, RESOURCES
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
  if loadavg (5min) > 2 then alert
  alert a@b
check file log with path "/log"
  ignore match "b"
  if size > 2147483648 then alert
  if match "a" then alert
  ignore match /patterns
"""


def test_rendered_monit_file_is_canonical() -> None:
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
def test_any_program_argument_can_be_rendered(word: str, spelled: str) -> None:
    file = MonitFile((Check("process", "a", pidfile="/p", start=MonitProgram(("/x", word))),))

    assert f'  start program "{spelled}"\n' in monit_render.render(file)
    assert parser.parse(monit_render.render(file), origin="x") == file


# --- arbitrary values -------------------------------------------------------------------------------------------------

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
    MonitProgram, st.lists(TEXT, min_size=1, max_size=5).map(tuple), st.just("") | OWNER, st.just("") | OWNER, NUMBER
)
EXEC = st.builds(
    MonitProgram, st.lists(TEXT, min_size=1, max_size=5).map(tuple), st.just("") | OWNER, st.just("") | OWNER
)
ACTION = st.builds(Action, st.sampled_from(["alert", "restart", "start", "stop", "unmonitor"])) | st.builds(
    Action, st.just("exec"), EXEC
)
RATE = st.tuples(st.integers(1, 64), st.integers(1, 64)).map(lambda pair: Rate(min(pair), max(pair)))


def limit(metric: str) -> SearchStrategy[Limit]:
    """Generate limits for ``metric`` that a monit file can express."""
    percent = st.builds(Limit, st.just(metric), OPERATOR, NUMBER, st.just(True))
    amount = st.builds(lambda number, unit: number * unit, NUMBER | REAL, UNITS)
    if metric.startswith("loadavg"):
        return st.builds(Limit, st.just(metric), OPERATOR, NUMBER | REAL)
    if metric in ("memory", "totalmemory", "space", "swap"):
        return percent | st.builds(Limit, st.just(metric), OPERATOR, amount)
    if metric in ("children", "inode"):
        return st.builds(Limit, st.just(metric), OPERATOR, NUMBER)
    return percent


DIALOGUE = st.lists(st.tuples(st.just("send"), TEXT) | st.tuples(st.just("expect"), REGEX), min_size=1, max_size=3).map(
    tuple
)
PROTOCOL = st.one_of(
    st.sampled_from(PLAIN_PROTOCOLS).map(Protocol),
    st.just(Protocol("http")),
    st.builds(Protocol, st.just("http"), PATH, TEXT),
    st.builds(Protocol, st.just("generic"), dialogue=DIALOGUE),
)
PAGE = st.builds(
    Protocol,
    st.just("http"),
    st.just("/a?b=(c)"),
    content=REGEX.filter(bool),
    is_negated=st.booleans(),
    credentials=st.sampled_from(["", "u:p"]),
)
PORT_TEST = st.builds(Connection, FILLED, PORT, st.just(""), PROTOCOL, NUMBER, st.booleans()).map(
    lambda test: replace(test, is_udp=test.is_udp or test.protocol.name == "ntp3")
)
SOCKET_PROTOCOL = PROTOCOL.filter(lambda protocol: protocol.name != "ntp3")
SOCKET_TEST = st.builds(Connection, st.just(""), st.just(0), PATH, SOCKET_PROTOCOL, NUMBER)
URL_TEST = st.builds(Connection, st.sampled_from(["h", "10.0.0.1"]), PORT, st.just(""), PAGE, NUMBER)
ALGORITHM = st.sampled_from(["md5", "sha1"])
AGE = st.builds(Limit, st.just("timestamp"), OPERATOR, NUMBER)
PATH_TESTS: list[SearchStrategy[Test]] = [
    st.builds(Unlike, st.sampled_from(["uid", "gid"]), OWNER),
    st.builds(Unlike, st.just("permission"), st.integers(0, 0o7777).map(lambda mode: f"{mode:o}")),
]
LINES = st.builds(Match, REGEX.filter(bool), st.booleans())
DIGEST = st.sampled_from([Unlike("checksum", "1a" * 16), Unlike("checksum", "f0" * 20, "sha1")])
FILE_TESTS: list[SearchStrategy[Test]] = [
    DIGEST,
    st.builds(Unlike, st.just("checksum"), st.just(""), ALGORITHM),
    st.builds(Changed, st.just("checksum"), ALGORITHM),
    st.just(Changed("size")),
    st.builds(Limit, st.just("size"), OPERATOR, NUMBER),
    LINES,
]
AGES: list[SearchStrategy[Test]] = [AGE, st.just(Changed("timestamp"))]
COUNT_TEST = st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)).map(lambda pair: Restarts(min(pair), max(pair)))
TESTS: dict[Kind, list[SearchStrategy[Test]]] = {
    "process": [
        *(limit(metric) for metric, kinds in RESOURCES.items() if "process" in kinds),
        *(st.just(PidChanged()), st.just(Changed("ppid")), PORT_TEST, SOCKET_TEST, URL_TEST),
    ],
    "filesystem": [limit("space"), limit("inode"), st.just(Changed("fsflag")), *PATH_TESTS],
    "file": [*PATH_TESTS, *AGES, *FILE_TESTS],
    "directory": [*PATH_TESTS, *AGES],
    "fifo": [*PATH_TESTS, *AGES],
    "host": [PORT_TEST, URL_TEST, st.builds(Echo, NUMBER, NUMBER)],
    "system": [limit(metric) for metric, kinds in RESOURCES.items() if "system" in kinds],
    "status": [],
}


@st.composite
def rules(draw: st.DrawFn, kind: Kind) -> Rule:
    common: list[SearchStrategy[Test]] = [COUNT_TEST] if kind == "system" else [COUNT_TEST, st.just(Missing())]
    test = draw(st.one_of(*common, *TESTS[kind]))
    if isinstance(test, Restarts):
        return Rule(test, draw(ACTION), recovery=IGNORE)
    if isinstance(test, CHANGES):
        return Rule(test, draw(ACTION), draw(RATE), IGNORE)
    return Rule(test, draw(ACTION), draw(RATE), draw(st.just(ALERT) | ACTION), draw(st.just(Rate()) | RATE))


@st.composite
def checks(draw: st.DrawFn) -> Check:
    kind = draw(st.sampled_from(sorted(TESTS)))
    found = draw(st.lists(rules(kind), max_size=4))
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
        passed_over=tuple(draw(st.lists(LINES, max_size=2))) if kind == "file" else (),
    )


UNSUPPORTED = "if failed port 1 protocol radius secret s then alert"


@st.composite
def files(draw: st.DrawFn) -> MonitFile:
    services = draw(st.lists(checks(), max_size=3, unique_by=lambda check: check.name.lower()))
    outside = draw(st.lists(st.sampled_from(["set daemon 5", "include '/a b'", "set alert a@b { uid }"]), max_size=2))
    others = [
        Ignored(UNSUPPORTED if check.kind == "host" else "noalert a@b", check.name)
        for check in services
        if check.kind == "host" or draw(st.booleans())  # A host check must have a test.
    ]
    return MonitFile(tuple(services), (*map(Ignored, outside), *others))


@given(files())
@settings(max_examples=50)
def test_rendered_monit_file_parses_to_the_original(file: MonitFile) -> None:
    assert parser.parse(monit_render.render(file), origin="rendered") == file
