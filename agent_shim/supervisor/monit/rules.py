"""Parser of rules and programs in a monit control file. Pure.

``if TEST [RATE] then ACTION [else if succeeded [RATE] then ACTION]``, all in a fixed order: user and group precede the
timeout, and a timeout precedes the rate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple, cast

import msgspec

from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.monit import ast as values
from agent_shim.supervisor.monit.ignored_statements import UNITS
from agent_shim.supervisor.monit.reader import Reader

MAX_CYCLES: Final = 64
"""Checks of a test remembered by monit."""

MAX_WORDS: Final = 63
"""Maximum words of a program, including its path."""

MODE_BITS: Final = 0o7777
SECONDS: Final[Mapping[str, int]] = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
SUMS: Final[Mapping[str, int]] = {"md5": 32, "sha1": 40}
"""Hexadecimal digits of a checksum."""

PLAIN_PROTOCOLS: Final = (
    "clamav",
    "default",
    "dns",
    "dwp",
    "ftp",
    "gps",
    "imap",
    "ldap2",
    "ldap3",
    "lmtp",
    "memcache",
    "mysql",
    "nntp",
    "ntp3",
    "pgsql",
    "pop",
    "postfix-policy",
    "rdate",
    "rsync",
    "smtp",
    "ssh",
    "tns",
)
"""Protocols without options."""

PROTOCOLS: Final = tuple(sorted((*PLAIN_PROTOCOLS, "apache-status", "http", "radius", "sip")))

APACHE_LIMITS: Final = (
    "loglimit",
    "closelimit",
    "dnslimit",
    "keepalivelimit",
    "replylimit",
    "requestlimit",
    "startlimit",
    "waitlimit",
    "gracefullimit",
    "cleanuplimit",
)

MAX_HOPS: Final = 255
"""A larger value counts as absent."""

NO_TLS: Final = "monit on a BOSH machine has no TLS"


def read_program(reader: Reader, *, timed: bool = True) -> values.Program:
    """Parse the words after ``start``, ``stop`` or ``exec``, then user and group and, if ``timed``, the timeout."""
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
        return values.Program(tuple(argv), uid, gid)
    timeout = reader.timeout(values.START_TIMEOUT)
    if reader.kind in ("uid", "gid"):
        raise reader.error(f"'{reader.kind}' before 'timeout'")
    return values.Program(tuple(argv), uid, gid, timeout)


def read_rule(reader: Reader, kind: values.Kind, address: str) -> values.Rule:
    """Parse a rule of a check of this kind; ``address`` is that of a host.

    A rule without a rate has none. (monit 5.2.5 applies the rate of the preceding rule if that one tests existence or a
    pid change: a bug of ``seteventaction`` in ``p.y``.)
    """
    line = reader.line(reader.skip())
    test = TESTS[_wanted(reader, kind)].read(reader)
    # Resource tests may follow each other; monit keeps the last.
    while isinstance(test, values.Limit) and reader.kind in RESOURCES and kind in TESTS[reader.kind].kinds:
        test = _resource(reader)
    if isinstance(test, values.Connection) and not (test.host or test.unixsocket):
        test = msgspec.structs.replace(test, host=address or "localhost")
    is_count = isinstance(test, values.Restarts)
    rate = values.ONCE if is_count else _rate(reader)
    reader.need("'then'" if is_count else "a rate or 'then'", "then")
    action = values.Action("unmonitor") if is_count and reader.take("timeout") else _action(reader)
    recovers = not isinstance(test, values.Changed | values.Restarts | values.Match)
    recovery, recovery_rate = _recovery(reader) if recovers else (values.IGNORE, values.ONCE)
    return values.Rule(test, action, rate, recovery, recovery_rate, line)


def read_ignore(reader: Reader) -> values.Rule:
    """Parse ``ignore [not] match PATTERN``: lines hidden from other rules."""
    line = reader.line(reader.skip())
    if reader.kind not in ("not", "match"):
        raise reader.error("'match' or 'not match' after 'ignore'")
    return values.Rule(_match(reader), values.IGNORE, recovery=values.IGNORE, line=line)


def _wanted(reader: Reader, kind: values.Kind) -> str:
    """Return the next test as a key of ``TESTS``."""
    first, second = reader.next, reader.second
    is_pair = first.kind in ("not", "changed", "failed")
    wanted = f"{first.kind} {second.kind}" if is_pair else first.kind
    if wanted in TESTS and kind in TESTS[wanted].kinds:
        return wanted
    known = [name for name, test in TESTS.items() if kind in test.kinds]
    if is_pair and (alike := [name for name in known if name.startswith(f"{first.kind} ")]):
        raise reader.error(f"a test of check {kind}: {_listed(alike)}", second)
    raise reader.error(f"a test of check {kind}: {_listed(known)}", first)


def _listed(names: Iterable[str]) -> str:
    return ", ".join("a number of restarts" if name == "NUMBER" else f"'{name}'" for name in names)


def _owner(reader: Reader, expected: str) -> str:
    """Parse a name or a number."""
    return reader.string(expected) if reader.kind == "STRING" else str(reader.number(expected))


def _rate(reader: Reader) -> values.Rate:
    """Parse ``N cycles`` or ``N times within M cycles``; once if absent."""
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
    if reader.kind == "exec":
        return values.Action("exec", read_program(reader, timed=False))
    kinds = ("alert", "restart", "start", "stop", "unmonitor")
    return values.Action(cast("values.ActionKind", reader.need(f"an action ({', '.join(kinds)} or exec)", *kinds).kind))


def _recovery(reader: Reader) -> tuple[values.Action, values.Rate]:
    if not reader.take("else"):
        return values.ALERT, values.ONCE
    reader.need("'if'", "if")
    reader.need("'succeeded', 'passed' or 'recovered'", "succeeded", "passed", "recovered")
    rate = _rate(reader)
    reader.need("a rate or 'then'", "then")
    return _action(reader), rate


# --- tests ----------------------------------------------------------------------------------------------------------


def _missing(reader: Reader) -> values.Missing:
    reader.need("'not'", "not")
    reader.need("'exist'", "exist")
    return values.Missing()


def _changed(reader: Reader) -> values.Changed:
    reader.need("'changed'", "changed")
    algorithm = reader.take(*SUMS)
    what = reader.need("'checksum'", "checksum") if algorithm else reader.skip()
    return values.Changed(cast("values.Change", what.kind), algorithm.kind if algorithm else "")


def _restarts(reader: Reader) -> values.Restarts:
    token = reader.next
    count = reader.number("a number of restarts")
    reader.need("'restarts'", "restart")
    cycles = reader.number("a number of cycles")
    reader.need("'cycles'", "cycle")
    if not 1 <= count <= cycles:
        raise reader.error(f"a number of restarts from 1 to {cycles}" if cycles else "cycles above 0", token)
    return values.Restarts(count, cycles)


def _resource(reader: Reader) -> values.Limit:
    metric, operator = _metric(reader)
    if metric == "children":
        return values.Limit(metric, operator, reader.number("a number"))
    if metric.startswith("loadavg"):
        return values.Limit(metric, operator, reader.figure("a number"))
    if metric in ("memory", "totalmemory", "swap"):
        return _amount(reader, metric, operator)
    limit = values.Limit(metric, operator, reader.number("a whole number of percent"), percent=True)
    reader.need("'%'", "%")
    return limit


def _space(reader: Reader) -> values.Limit:
    return _amount(reader, *_metric(reader))


def _inode(reader: Reader) -> values.Limit:
    return values.Limit(*_metric(reader), reader.number("a number"), percent=reader.take("%") is not None)


def _size(reader: Reader) -> values.Limit:
    return values.Limit(*_metric(reader), reader.number(AMOUNT) * _unit(reader, UNITS))


def _timestamp(reader: Reader) -> values.Limit:
    return values.Limit(*_metric(reader), reader.number("a number") * _unit(reader, SECONDS))


def _metric(reader: Reader) -> tuple[str, values.Operator]:
    metric, operator = reader.skip().kind, reader.take(">", "<", "=", "!=", "changed")
    if operator is None:
        return metric, "="
    return metric, "!=" if operator.kind == "changed" else cast("values.Operator", operator.kind)


AMOUNT: Final = "a number, a blank and a unit, like '500 mb'"


def _amount(reader: Reader, metric: str, operator: values.Operator) -> values.Limit:
    """Parse bytes in some unit, or an integer percentage."""
    is_whole = reader.kind == "NUMBER"
    value = reader.figure(AMOUNT)
    if is_whole and reader.take("%"):
        return values.Limit(metric, operator, value, percent=True)
    return values.Limit(metric, operator, value * _unit(reader, UNITS))


def _unit(reader: Reader, units: Mapping[str, int]) -> int:
    unit = reader.take(*units)
    return units[unit.kind] if unit else 1


def _checksum(reader: Reader) -> values.Checksum:
    reader.need("'failed'", "failed")
    algorithm = reader.take(*SUMS)
    reader.need("'checksum'", "checksum")
    if not reader.take("expect"):
        return values.Checksum(algorithm.kind if algorithm else "")
    return values.Checksum(*_sum(reader, algorithm.kind if algorithm else ""))


def _sum(reader: Reader, algorithm: str = "") -> tuple[str, str]:
    """Parse a checksum; the number of digits determines the algorithm."""
    token = reader.need("a checksum", "STRING")
    digits = "".join(re.findall("[0-9a-f]", token.value.lower()))
    for name, length in SUMS.items():
        if len(digits) == length and algorithm in ("", name):
            return name, digits
    lengths = " or ".join(f"{length} ({name})" for name, length in SUMS.items() if algorithm in ("", name))
    raise reader.error(f"a checksum of {lengths} hexadecimal digits", token)


def _permission(reader: Reader) -> values.Permission:
    reader.need("'failed'", "failed")
    reader.need("'permission'", "permission")
    token = reader.next
    digits = str(reader.number("a mode"))
    if "8" in digits or "9" in digits or int(digits, 8) > MODE_BITS:
        raise reader.error("an octal number up to 7777", token)
    return values.Permission(int(digits, 8))


def _owner_test(reader: Reader) -> values.Owner:
    reader.need("'failed'", "failed")
    what = reader.need("'uid' or 'gid'", "uid", "gid").kind
    return values.Owner(cast("Literal['uid', 'gid']", what), _owner(reader, "a name or a number"))


def _match(reader: Reader) -> values.Match:
    negated = reader.take("not") is not None
    reader.need("'match'", "match")
    if path := reader.take("PATH"):
        return values.Match(path=path.value, negated=negated)
    return values.Match(read_regex(reader, "STRING"), negated=negated)


def read_regex(reader: Reader, *kinds: str) -> str:
    """Parse a regular expression given by a token of one of these kinds."""
    token = reader.need("a regular expression", *kinds)
    try:
        posix_regex.compiled(token.value)
    except ValueError as exc:
        raise reader.error(f"a regular expression ({exc})", token) from exc
    return token.value


def _ping(reader: Reader) -> values.Ping:
    reader.need("'failed'", "failed")
    reader.need("'icmp'", "icmp")
    reader.need("'type'", "type")
    reader.need("'echo'", "echo")
    count = reader.number("a number of requests") if reader.take("count") else values.PING_COUNT
    return values.Ping(count, reader.timeout(values.NET_TIMEOUT))


# --- connections ----------------------------------------------------------------------------------------------------


def _connection(reader: Reader) -> values.Connection:
    """Parse ``[host H] port P`` or ``unixsocket PATH``; ``host`` is empty if absent."""
    reader.need("'failed'", "failed")
    host, port, path = "", 0, ""
    if reader.take("unixsocket"):
        path = reader.path("a path")
    else:
        if reader.take("host"):
            host = reader.string("a host name or address")
        reader.need("'port'", "port")
        port = reader.number("a port")
    kind = reader.need(f"'tcp' or 'udp' ({NO_TLS})", "tcp", "udp").kind if reader.take("type") else "tcp"
    protocol = _protocol(reader)
    if protocol.name == "ntp3":
        kind = "udp"
    return values.Connection(
        host, port, path, cast("Literal['tcp', 'udp']", kind), protocol, reader.timeout(values.NET_TIMEOUT)
    )


def _url(reader: Reader) -> values.Connection:
    """Parse ``url URL [content = REGEX]``, short for a host, a port and an http request."""
    reader.need("'failed'", "failed")
    reader.need("'url'", "url")
    url = reader.url()
    content, operator = "", "="
    if reader.take("content"):
        operator = reader.need("'=' or '!='", "=", "!=").kind
        content = read_regex(reader, "STRING")
    request = (url["path"] or "/") + (url["query"] or "")
    protocol = values.Protocol("http", request, content=content, content_operator=cast("values.Operator", operator))
    return values.Connection(
        url["host"], int(url["port"] or 80), "", "tcp", protocol, reader.timeout(values.NET_TIMEOUT), url[0]
    )


def _protocol(reader: Reader) -> values.Protocol:
    if reader.kind in ("send", "expect"):
        return _dialogue(reader)
    if not reader.take("protocol"):
        return values.Protocol()
    name = reader.need(f"a protocol ({', '.join(PROTOCOLS)})", *PROTOCOLS).kind
    match name:
        case "http":
            return _http(reader)
        case "apache-status":
            return _apache_status(reader)
        case "radius":
            reader.need("'secret'", "secret")
            return values.Protocol(name, secret=reader.string("a secret"))
        case "sip":
            return _sip(reader)
    return values.Protocol(name)


def _dialogue(reader: Reader) -> values.Protocol:
    lines: list[tuple[Literal["send", "expect"], str]] = []
    while line := reader.take("send", "expect"):
        if line.kind == "send":
            lines.append(("send", reader.string("a text")))
        else:
            lines.append(("expect", read_regex(reader, "STRING")))
    return values.Protocol("generic", dialogue=tuple(lines))


def _http(reader: Reader) -> values.Protocol:
    """Parse ``[request PATH [checksum SUM] [hostheader NAME]]``."""
    if not reader.take("request"):
        return values.Protocol("http")
    request = reader.path("a path")
    checksum = _sum(reader)[1] if reader.take("checksum") else ""
    hostheader = reader.string("a host name") if reader.take("hostheader") else ""
    return values.Protocol("http", request, checksum, hostheader)


def _apache_status(reader: Reader) -> values.Protocol:
    limits: list[values.Limit] = []
    while not limits or reader.take("or"):
        if reader.kind not in APACHE_LIMITS:
            raise reader.error(f"one of {', '.join(APACHE_LIMITS)}")
        limits.append(values.Limit(*_metric(reader), reader.number("a number"), percent=True))
        reader.need("'%'", "%")
    return values.Protocol("apache-status", limits=tuple(limits))


def _sip(reader: Reader) -> values.Protocol:
    target = reader.need("an address", "MAIL", "STRING").value if reader.take("target") else ""
    hops = reader.number("a number of hops") if reader.take("maxforward") else values.MAX_FORWARD
    return values.Protocol("sip", target=target, maxforward=hops if hops <= MAX_HOPS else values.MAX_FORWARD)


class Reading(NamedTuple):
    """Reader of a test, and the check types that have it."""

    read: Callable[[Reader], values.Test]
    kinds: frozenset[str]


PROCESS: Final = frozenset({"process"})
HOST: Final = frozenset({"host"})
SYSTEM: Final = frozenset({"system"})
FILE: Final = frozenset({"file"})
FILESYSTEM: Final = frozenset({"filesystem"})
CONTENTS: Final = frozenset({"file", "directory", "fifo"})
PATHS: Final = CONTENTS | FILESYSTEM
STATUS: Final = frozenset({"status"})
ALL: Final = PATHS | PROCESS | HOST | SYSTEM | STATUS

RESOURCES: Final[Mapping[str, frozenset[str]]] = {
    "cpu": PROCESS,
    "totalcpu": PROCESS,
    "children": PROCESS,
    "memory": PROCESS | SYSTEM,
    "totalmemory": PROCESS | SYSTEM,
    "loadavg1": PROCESS | SYSTEM,
    "loadavg5": PROCESS | SYSTEM,
    "loadavg15": PROCESS | SYSTEM,
    "swap": SYSTEM,
    "cpu user": SYSTEM,
    "cpu system": SYSTEM,
    "cpu wait": SYSTEM,
}

TESTS: Final[Mapping[str, Reading]] = {
    "not exist": Reading(_missing, ALL - SYSTEM),
    "NUMBER": Reading(_restarts, ALL),
    "changed pid": Reading(_changed, PROCESS),
    "changed ppid": Reading(_changed, PROCESS),
    "failed host": Reading(_connection, PROCESS | HOST),
    "failed port": Reading(_connection, PROCESS | HOST),
    "failed url": Reading(_url, PROCESS | HOST),
    "failed unixsocket": Reading(_connection, PROCESS),
    "failed icmp": Reading(_ping, HOST),
    **{metric: Reading(_resource, kinds) for metric, kinds in RESOURCES.items()},
    "space": Reading(_space, FILESYSTEM),
    "inode": Reading(_inode, FILESYSTEM),
    "changed fsflag": Reading(_changed, FILESYSTEM),
    "timestamp": Reading(_timestamp, CONTENTS),
    "changed timestamp": Reading(_changed, CONTENTS),
    "size": Reading(_size, FILE),
    "changed size": Reading(_changed, FILE),
    "failed checksum": Reading(_checksum, FILE),
    "failed md5": Reading(_checksum, FILE),
    "failed sha1": Reading(_checksum, FILE),
    "changed checksum": Reading(_changed, FILE),
    "changed md5": Reading(_changed, FILE),
    "changed sha1": Reading(_changed, FILE),
    "match": Reading(_match, FILE),
    "not match": Reading(_match, FILE),
    "failed permission": Reading(_permission, PATHS),
    "failed uid": Reading(_owner_test, PATHS),
    "failed gid": Reading(_owner_test, PATHS),
}
"""Readers by the words after ``if``: two for ``not``, ``changed`` and ``failed``, else one."""
