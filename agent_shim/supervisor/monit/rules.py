"""Parser for rules and programs in a monit control file. Does no I/O.

A rule reads ``if TEST [RATE] then ACTION [else if succeeded [RATE] then ACTION]``. The parts of tests and programs have
a fixed order: user and group, timeout, rate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple, cast

from msgspec.structs import replace

from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.monit import ast as values
from agent_shim.supervisor.monit.lexer import URL
from agent_shim.supervisor.monit.reader import MAX_DIGITS, Reader

MAX_CYCLES: Final = 64
"""Maximum number of past checks that monit takes into account for one rule."""

MAX_WORDS: Final = 63
"""Maximum number of words in a program, including its path."""

UNITS: Final[Mapping[str, int]] = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}

AGES: Final[Mapping[str, int]] = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}

MAX_PERMISSION: Final = 0o7777

PLAIN_PROTOCOLS: Final = (
    *("clamav", "default", "dns", "dwp", "ftp", "gps", "imap", "ldap2", "ldap3", "lmtp", "memcache", "mysql", "nntp"),
    "ntp3",
    *("pgsql", "pop", "postfix-policy", "rdate", "rsync", "smtp", "ssh", "tns"),
)
"""Protocols without options, for which only the connection is tested."""

UNSPOKEN_PROTOCOLS: Final = frozenset(PLAIN_PROTOCOLS) - {"default"}

PROTOCOLS: Final = tuple(sorted((*PLAIN_PROTOCOLS, "apache-status", "http", "radius", "sip")))

DIGESTS: Final[Mapping[int, values.Algorithm]] = {32: "md5", 40: "sha1"}
"""Checksum algorithms, keyed by the number of hexadecimal digits in a checksum."""

NO_TLS: Final = "monit on a BOSH machine has no TLS"


def read_program(reader: Reader, *, timed: bool = True) -> values.MonitProgram:
    """Parse a program. It consists of a keyword (``start``, ``stop`` or ``exec``), the words of the command, an
    optional user and group, and an optional timeout. Set ``timed`` to False for ``exec``, which has no timeout.
    """
    reader.skip()
    argv = [reader.need("a program and its arguments", "STRING", "PATH").value]
    while token := reader.take("STRING", "PATH"):
        argv.append(token.value)
        if len(argv) > MAX_WORDS:
            raise reader.error(f"a program of {MAX_WORDS} words at most", token)
    uid = gid = ""
    while token := reader.take("uid", "gid"):
        if token.kind == "uid":
            uid = _owner(reader, "a user")
        else:
            gid = _owner(reader, "a group")
    if not timed:
        return values.MonitProgram(tuple(argv), uid, gid)
    timeout = reader.timeout(values.START_TIMEOUT)
    if reader.kind in ("uid", "gid"):
        raise reader.error(f"'{reader.kind}' before 'timeout'")
    return values.MonitProgram(tuple(argv), uid, gid, timeout)


def read_rule(reader: Reader, kind: values.Kind, address: str) -> values.Rule | None:
    """Parse a rule in a check of kind ``kind``. Return None if the agent does not act on its test. ``address`` is the
    host for connections that do not name one.

    A rule without a rate (``for N cycles``) fires on the first failed check. (In monit 5.2.5, it gets the rate of the
    preceding rule if that rule tests existence or a pid change, because of a bug in ``seteventaction`` in ``p.y``.)
    """
    line = reader.line(reader.skip())
    test = _test(reader, kind)
    if isinstance(test, values.Connection) and not (test.host or test.unixsocket):
        test = replace(test, host=address)
    ends = ("then", "if", "set", "END", "BAD")
    while test is None and reader.kind not in ends and not reader.kind.startswith("check "):
        reader.skip()  # skip the words of the test and its rate
    is_count = isinstance(test, values.Restarts)
    rate = values.ONCE if is_count else _rate(reader)
    reader.need("'then'" if is_count else "a rate or 'then'", "then")
    # In monit, ``then timeout`` after a number of restarts means ``unmonitor``.
    action = values.Action("unmonitor") if is_count and reader.take("timeout") else _action(reader)
    recovers = not isinstance(test, (values.Restarts, *values.CHANGES))
    recovery, recovery_rate = _recovery(reader) if recovers else (values.IGNORE, values.ONCE)
    return values.Rule(test, action, rate, recovery, recovery_rate, line) if test else None


def read_ignore(reader: Reader) -> values.Match | None:
    """Parse ``ignore [not] match PATTERN``. Return None if the statement names a file with patterns instead, in which
    case it has no effect.
    """
    reader.skip()
    is_negated = reader.take("not") is not None
    reader.need("'match' or 'not match' after 'ignore'", "match")
    found = _matched(reader, is_negated=is_negated)
    if found is None:
        reader.skip()
    return found


def _test(reader: Reader, kind: values.Kind) -> values.Test | None:
    """Parse the test of a rule. If the agent does not act on this test, return None; ``read_rule`` then skips the
    remaining words.
    """
    wanted = _test_key(reader, kind)
    test = _read_test(reader, wanted)
    # monit accepts several resource tests in a row, and uses only the last of them.
    while wanted in RESOURCES and reader.kind in RESOURCES and kind in TESTS[reader.kind].kinds:
        test = _read_test(reader, reader.kind)
    return test


def _read_test(reader: Reader, wanted: str) -> values.Test | None:
    """Parse a test whose key in ``TESTS`` is ``wanted``. Skip the words of the key, then call the key's function with
    the last of these words. For the key ``NUMBER``, nothing is skipped, because the function reads the number itself.
    """
    words = [] if wanted == "NUMBER" else wanted.split(" ") if wanted.startswith(PAIRS) else [wanted]
    for _ in words:
        reader.skip()
    return TESTS[wanted].read(reader, words[-1] if words else "")


def _test_key(reader: Reader, kind: values.Kind) -> str:
    """Return the key of the next test in ``TESTS``. Raises ``MonitSyntaxError`` if checks of kind ``kind`` do not
    support the test.
    """
    first, second = reader.next, reader.second
    is_pair = first.kind in PAIRS
    wanted = f"{first.kind} {second.kind}" if is_pair else first.kind
    if wanted in TESTS and kind in TESTS[wanted].kinds:
        return wanted
    known = [name for name, test in TESTS.items() if kind in test.kinds]
    alike = [name for name in known if is_pair and name.startswith(f"{first.kind} ")]
    raise reader.error(f"a test of check {kind}: {_listed(alike or known)}", second if is_pair else first)


def _listed(names: Iterable[str]) -> str:
    """Format a list of tests for an error message."""
    return ", ".join("a number of restarts" if name == "NUMBER" else f"'{name}'" for name in names)


def _owner(reader: Reader, expected: str) -> str:
    """Parse an owner, which is a name or a number."""
    return reader.string(expected) if reader.kind == "STRING" else str(reader.number(expected))


def _rate(reader: Reader) -> values.Rate:
    """Parse ``N cycles`` or ``N times within M cycles``. If there is no rate, return ``ONCE``."""
    if reader.kind != "NUMBER":
        return values.ONCE
    token = reader.next
    count = cycles = reader.number("a number of cycles")
    if reader.kind == "NUMBER":
        cycles = reader.number("a number of cycles")
    reader.need("'cycles'", "cycle")
    if not 1 <= cycles <= MAX_CYCLES:
        raise reader.error(f"a number of cycles from 1 to {MAX_CYCLES}", token)
    if not 1 <= count <= cycles:
        raise reader.error(f"a number of times from 1 to {cycles}", token)
    return values.Rate(count, cycles)


def _action(reader: Reader) -> values.Action:
    """Parse the action after ``then``."""
    if reader.kind == "exec":
        return values.Action("exec", read_program(reader, timed=False))
    kinds = ("alert", "restart", "start", "stop", "unmonitor")
    return values.Action(cast("values.ActionKind", reader.need(f"an action ({', '.join(kinds)} or exec)", *kinds).kind))


def _recovery(reader: Reader) -> tuple[values.Action, values.Rate]:
    """Parse ``[else if succeeded [RATE] then ACTION]``."""
    if not reader.take("else"):
        return values.ALERT, values.ONCE
    reader.need("'if'", "if")
    reader.need("'succeeded', 'passed' or 'recovered'", "succeeded", "passed", "recovered")
    rate = _rate(reader)
    reader.need("a rate or 'then'", "then")
    return _action(reader), rate


# --- tests ------------------------------------------------------------------------------------------------------------


def _restarts(reader: Reader, _: str) -> values.Restarts:
    """Parse ``N restarts within M cycles``."""
    token = reader.next
    count = reader.number("a number of restarts")
    reader.need("'restarts'", "restart")
    cycles = reader.number("a number of cycles")
    reader.need("'cycles'", "cycle")
    if not 1 <= count <= cycles:
        raise reader.error(f"a number of restarts from 1 to {cycles}" if cycles else "cycles above 0", token)
    return values.Restarts(count, cycles)


def _changed(reader: Reader, what: str) -> values.Changed:
    """Parse the rest of ``changed WHAT``. ``md5`` and ``sha1`` must be followed by the word ``checksum``."""
    if what in ("md5", "sha1"):
        reader.need("'checksum'", "checksum")
        return values.Changed("checksum", cast("values.Algorithm", what))
    return values.Changed(cast('Literal["checksum", "fsflag", "ppid", "size", "timestamp"]', what))


def _owned(reader: Reader, what: str) -> values.Unlike:
    """Parse the owner after ``failed uid`` or ``failed gid``."""
    return values.Unlike(cast('Literal["gid", "uid"]', what), _owner(reader, "a user" if what == "uid" else "a group"))


def _permission(reader: Reader, _: str) -> values.Unlike:
    """Parse the mode after ``failed permission``."""
    token, expected = reader.next, "an octal number from 0 to 7777"
    digits = str(reader.number(expected))
    if set(digits) - set("01234567") or int(digits, 8) > MAX_PERMISSION:
        raise reader.error(expected, token)
    return values.Unlike("permission", digits)


def _checksum(reader: Reader, word: str) -> values.Unlike:
    """Parse ``[md5|sha1] checksum [expect DIGITS]``."""
    algorithm = None
    if word != "checksum":
        algorithm = cast("values.Algorithm", word)
        reader.need("'checksum'", "checksum")
    if not reader.take("expect"):
        return values.Unlike("checksum", "", algorithm or "md5")
    return values.Unlike("checksum", *_digest(reader, algorithm))


def _digest(reader: Reader, algorithm: values.Algorithm | None = None) -> tuple[str, values.Algorithm]:
    """Parse a checksum, ignoring all characters except hexadecimal digits. The length must be that of ``algorithm`` or,
    if that is None, of any known algorithm.
    """
    token = reader.next
    digits = "".join(re.findall("[0-9a-f]", reader.string("a checksum").lower()))
    found = DIGESTS.get(len(digits))
    if found is None or algorithm not in (None, found):
        raise reader.error(f"a checksum of {algorithm or 'md5 or sha1'}", token)
    return digits, found


def _matched(reader: Reader, *, is_negated: bool) -> values.Match | None:
    """Parse the pattern after ``match``. Return None if the path of a pattern file follows instead, which is not
    supported. The caller has to consume this path.
    """
    if reader.kind == "PATH":
        return None
    if reader.kind != "STRING":
        raise reader.error("a regular expression or a path")
    return values.Match(read_regex(reader, "STRING"), is_negated)


def _limit(reader: Reader, metric: str) -> values.Limit:
    """Parse ``[OPERATOR] VALUE``. The metric determines which units are allowed."""
    taken = reader.take(">", "<", "=", "!=", "changed")
    sign = taken.kind if taken else "="
    # monit's grammar accepts ``changed`` as a spelling of ``!=``.
    operator = cast("values.Operator", "!=" if sign == "changed" else sign)
    value: float
    is_percent, units = False, UNITS
    is_whole = reader.kind == "NUMBER"  # monit allows a percentage only without a decimal point
    match metric:
        case "children":
            return values.Limit(metric, operator, reader.number("a number"))
        case "loadavg1" | "loadavg5" | "loadavg15":
            return values.Limit(metric, operator, reader.figure("a number"))
        case "inode":
            return values.Limit(metric, operator, reader.number("a number"), percent=reader.take("%") is not None)
        case "timestamp":
            value, units = reader.number("a number, a blank and a unit, like '5 minutes'"), AGES
        case "size":
            value = reader.number(AMOUNT)
        case "memory" | "totalmemory" | "swap" | "space":
            value = reader.figure(AMOUNT)
            is_percent = is_whole and reader.take("%") is not None
        case _:  # processor usage
            value, is_percent = reader.number("a whole number of percent"), True
            reader.need("'%'", "%")
    unit = None if is_percent else reader.take(*units)
    return values.Limit(metric, operator, value * (units[unit.kind] if unit else 1), percent=is_percent)


AMOUNT: Final = "a number, a blank and a unit, like '500 mb'"


def read_regex(reader: Reader, *kinds: str) -> str:
    """Read a valid regular expression. The next token's kind must be one of ``kinds``."""
    token = reader.need("a regular expression", *kinds)
    try:
        posix_regex.compiled(token.value)
    except ValueError as exc:
        raise reader.error(f"a regular expression ({exc})", token) from exc
    return token.value


# --- connections ------------------------------------------------------------------------------------------------------


def _echo(reader: Reader, _: str) -> values.Echo:
    """Parse ``type echo [count N]`` and a timeout."""
    reader.need("'type'", "type")
    reader.need("'echo'", "echo")
    count = reader.number("a number of requests") if reader.take("count") else values.ECHO_COUNT
    return values.Echo(count, reader.timeout(values.NET_TIMEOUT))


def _url(reader: Reader, _: str) -> values.Connection:
    """Parse ``URL [content = PATTERN]`` and a timeout."""
    token = reader.need("a URL like http://HOST:PORT/PATH, and a blank", "URL")
    url = re.fullmatch(URL, token.value)
    if url is None or url["scheme"].lower() != "http":
        raise reader.error(f"a URL like http://HOST:PORT/PATH ({NO_TLS})", token)
    port = url["port"] or "80"
    if len(port) > MAX_DIGITS:  # the same limit as in ``Reader.number``
        raise reader.error(f"a port of {MAX_DIGITS} digits at most", token)
    request = (url["path"] or "/") + (f"?{url['query']}" if url["query"] else "")
    content, is_negated = "", False
    if reader.take("content"):
        is_negated = reader.need("'=' or '!='", "=", "!=").kind == "!="
        content = read_regex(reader, "STRING")
    protocol = values.Protocol(
        "http", request, content=content, is_negated=is_negated, credentials=url["credentials"] or ""
    )
    timeout = reader.timeout(values.NET_TIMEOUT)
    return values.Connection(url["host"], int(port), protocol=protocol, timeout=timeout)


def _connection(reader: Reader, word: str) -> values.Connection | None:
    """Parse ``[host H] port P`` or ``unixsocket PATH``, then the protocol and a timeout. The first word, ``word``, has
    already been read.

    Return None for an unsupported protocol. If there is no host, ``read_rule`` inserts the default.
    """
    host, port, path = "", 0, ""
    if word == "unixsocket":
        path = reader.path("a path")
    else:
        if word == "host":
            host = reader.string("a host name or address")
            reader.need("'port'", "port")
        port = reader.number("a port")
    is_udp = bool(reader.take("type")) and reader.need(f"'tcp' or 'udp' ({NO_TLS})", "tcp", "udp").kind == "udp"
    protocol = _protocol(reader)
    if protocol is None:
        return None
    is_udp = is_udp or protocol.name == "ntp3"
    return values.Connection(host, port, path, protocol, reader.timeout(values.NET_TIMEOUT), is_udp)


def _protocol(reader: Reader) -> values.Protocol | None:
    """Parse ``[protocol NAME …]`` or a dialogue. Return None for an unsupported protocol."""
    if reader.kind in ("send", "expect"):
        return _dialogue(reader)
    if not reader.take("protocol"):
        return values.Protocol()
    name = reader.need(f"a protocol ({', '.join(PROTOCOLS)})", *PROTOCOLS).kind
    if name == "http":
        return _http(reader)
    return values.Protocol(name) if name in PLAIN_PROTOCOLS else None


def _dialogue(reader: Reader) -> values.Protocol:
    """Parse ``send TEXT`` and ``expect PATTERN`` steps."""
    lines: list[tuple[Literal["send", "expect"], str]] = []
    while line := reader.take("send", "expect"):
        if line.kind == "send":
            lines.append(("send", reader.string("a text")))
        else:
            lines.append(("expect", read_regex(reader, "STRING")))
    return values.Protocol("generic", dialogue=tuple(lines))


def _http(reader: Reader) -> values.Protocol:
    """Parse ``[request PATH [checksum DIGITS] [hostheader NAME]]``."""
    if not reader.take("request"):
        return values.Protocol("http")
    request = reader.path("a path")
    checksum = _digest(reader)[0] if reader.take("checksum") else ""
    hostheader = reader.string("a host name") if reader.take("hostheader") else ""
    return values.Protocol("http", request, hostheader, checksum)


class Reading(NamedTuple):
    """A function that parses a test, and the check types that support the test. The function is called with the reader
    and the last word of the test's key in ``TESTS``.
    """

    read: Callable[[Reader, str], values.Test | None]
    kinds: frozenset[str]


PROCESS: Final = frozenset({"process"})
SYSTEM: Final = frozenset({"system"})
FILE: Final = frozenset({"file"})
FILESYSTEM: Final = frozenset({"filesystem"})
STATUS: Final = frozenset({"status"})
HOST: Final = frozenset({"host"})
ALL: Final = PROCESS | SYSTEM | FILE | FILESYSTEM | STATUS | HOST | {"directory", "fifo"}

PATHS: Final = FILE | {"directory", "fifo"}

RESOURCES: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("cpu", "totalcpu", "children"), PROCESS),
    **dict.fromkeys(("cpu user", "cpu system", "cpu wait", "swap"), SYSTEM),
    **dict.fromkeys(("memory", "totalmemory", "loadavg1", "loadavg5", "loadavg15"), PROCESS | SYSTEM),
}

PAIRS: Final = ("not", "changed", "failed")
"""First words of tests whose keys consist of two words."""

TESTS: Final[Mapping[str, Reading]] = {
    "not exist": Reading(lambda _, __: values.Missing(), ALL - SYSTEM),
    "NUMBER": Reading(_restarts, ALL),
    "changed pid": Reading(lambda _, __: values.PidChanged(), PROCESS),
    "changed ppid": Reading(_changed, PROCESS),
    "failed host": Reading(_connection, PROCESS | HOST),
    "failed port": Reading(_connection, PROCESS | HOST),
    "failed unixsocket": Reading(_connection, PROCESS),
    "failed url": Reading(_url, PROCESS | HOST),
    "failed icmp": Reading(_echo, HOST),
    **{metric: Reading(_limit, kinds) for metric, kinds in RESOURCES.items()},
    "space": Reading(_limit, FILESYSTEM),
    "inode": Reading(_limit, FILESYSTEM),
    "changed fsflag": Reading(_changed, FILESYSTEM),
    "size": Reading(_limit, FILE),
    "changed size": Reading(_changed, FILE),
    **{f"changed {word}": Reading(_changed, FILE) for word in ("checksum", "md5", "sha1")},
    **{f"failed {word}": Reading(_checksum, FILE) for word in ("checksum", "md5", "sha1")},
    "match": Reading(lambda reader, _: _matched(reader, is_negated=False), FILE),
    "not match": Reading(lambda reader, _: _matched(reader, is_negated=True), FILE),
    "timestamp": Reading(_limit, PATHS),
    "changed timestamp": Reading(_changed, PATHS),
    "failed permission": Reading(_permission, PATHS | FILESYSTEM),
    "failed uid": Reading(_owned, PATHS | FILESYSTEM),
    "failed gid": Reading(_owned, PATHS | FILESYSTEM),
}
"""Maps the words after ``if`` to the function that reads the test. A key has two words if the first is in ``PAIRS``,
otherwise one.
"""

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "alert ADDRESS, noalert ADDRESS": "alerts go to the Health Monitor",
    "set …, include …": "they configure the monit daemon, which the agent replaces",
    "if failed … protocol apache-status, radius or sip …": "no known release tests these protocols",
    "… protocol ftp, mysql and others without options": "only the connection is tested; no known release needs more",
    "if match PATH, ignore match PATH": "no known release reads patterns from another file",
}
"""Statements that are parsed and listed but have no effect, and the reasons. If such a statement is a rule, the words
before ``then`` are not checked.
"""
