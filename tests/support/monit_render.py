"""Renders a parsed monit control file as text that parses to the same values. The functions have no side effects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Final

from agent_shim.supervisor.monit import ast as values
from agent_shim.supervisor.monit.lexer import WORD
from agent_shim.supervisor.monit.rules import UNITS

BYTES: Final = frozenset({"memory", "totalmemory", "space", "swap"})
METRICS: Final = {
    **{f"loadavg{minutes}": f"loadavg ({minutes}min)" for minutes in (1, 5, 15)},
    **{f"cpu {share}": f"cpu ({share})" for share in ("user", "system", "wait")},
}
_ESCAPES: Final[Mapping[str, str]] = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_UNSAFE: Final = re.compile(r"[\\\n\r\t\"'\udc80-\udcff]")
_BARE_ARGUMENT: Final = re.compile(r"[^ \t\n\"'\r][^ \t\n\"]*")
_SURROGATE: Final = 0xDC00


def render(file: values.MonitFile) -> str:
    """Render ``file`` in its canonical form."""
    lines = [ignored.statement for ignored in file.ignored if not ignored.service]
    for check in file.services:
        others = [f"  {ignored.statement}" for ignored in file.ignored if ignored.service == check.name]
        lines += [*_check(check), *others]
    return "".join(f"{line}\n" for line in lines)


def _check(check: values.Check) -> Iterator[str]:
    yield f"check {check.kind} {_name(check.name)}{_subject(check)}"
    for word, program in (("start", check.start), ("stop", check.stop)):
        if program:
            yield f"  {word} program {_program(program)}"
    for group in check.groups:
        yield f"  group {_name(group)}"
    if check.depends:
        yield f"  depends on {', '.join(check.depends)}"
    if check.mode != "active":
        yield f"  mode {check.mode}"
    if check.every != 1:
        yield f"  every {check.every} cycles"
    for each in check.passed_over:
        yield f"  ignore {'not ' if each.is_negated else ''}match {_string(each.pattern)}"
    for rule in check.rules:
        yield f"  {_rule(rule)}"


def _subject(check: values.Check) -> str:
    if check.kind == "system":
        return ""
    if check.kind == "host":
        return f" with address {_string(check.address)}"
    if check.kind != "process":
        return f" with path {_path(check.path)}"
    return f" with pidfile {_path(check.pidfile)}" if check.pidfile else f" matching {_string(check.matching)}"


def _rule(rule: values.Rule) -> str:
    text = f"if {_test(rule.test)}{_rate(rule.rate)} then {_action(rule.action)}"
    if rule.recovery.kind == "ignore" or (rule.recovery == values.ALERT and rule.recovery_rate == values.ONCE):
        return text
    return f"{text} else if succeeded{_rate(rule.recovery_rate)} then {_action(rule.recovery)}"


def _rate(rate: values.Rate) -> str:
    if rate == values.ONCE:
        return ""
    if rate.count == rate.cycles:
        return f" for {rate.count} cycles"
    return f" {rate.count} times within {rate.cycles} cycles"


def _action(action: values.Action) -> str:
    return f"{action.kind} {_program(action.program)}" if action.program else action.kind


def _program(program: values.MonitProgram) -> str:
    text = f'"{" ".join(map(_argument, program.argv))}"'
    if program.uid:
        text += f" as uid {_identity(program.uid)}"
    if program.gid:
        text += f" as gid {_identity(program.gid)}"
    if program.timeout != values.START_TIMEOUT:
        text += f" with timeout {program.timeout} seconds"
    return text


def _test(test: values.Test) -> str:
    match test:
        case values.Missing():
            return "does not exist"
        case values.PidChanged():
            return "changed pid"
        case values.Restarts():
            return f"{test.count} restarts within {test.cycles} cycles"
        case values.Limit():
            return _limit(test)
        case values.Connection():
            return _connection(test)
        case values.Echo():
            return f"failed icmp type echo count {test.count}{_timeout(test.timeout)}"
        case values.Changed():
            return f"changed {_algorithm(test)}{test.what}"
        case values.Unlike():
            return f"failed {_algorithm(test)}{test.what}{_unlike(test)}"
        case values.Match():
            return f"{'not ' if test.is_negated else ''}match {_string(test.pattern)}"
        case values.WrongType() | values.Unreadable():
            raise ValueError("monit has no words for it")


def _algorithm(test: values.Changed | values.Unlike) -> str:
    return f"{test.algorithm} " if test.what == "checksum" else ""


def _unlike(test: values.Unlike) -> str:
    match test.what:
        case "permission":
            return f" {test.value}"
        case "checksum":
            return f" expect {_string(test.value)}" if test.value else ""
    return f" {_identity(test.value)}"


def _limit(limit: values.Limit) -> str:
    if limit.percent:
        figure = f"{_number(limit.limit)} %"
    elif limit.metric == "size":
        figure = _number(limit.limit)
    elif limit.metric in BYTES:
        figure = _scaled(limit.limit, UNITS)
    else:
        figure = _number(limit.limit)
    return f"{METRICS.get(limit.metric, limit.metric)} {limit.operator} {figure}"


def _scaled(value: float, units: Mapping[str, int]) -> str:
    """Format a number with the largest unit that keeps it an integer.

    The result has no more digits than the original text.
    """
    unit = max((unit for unit in units if value % units[unit] == 0), key=units.__getitem__, default=next(iter(units)))
    whole = int(value) // units[unit]
    return f"{whole if value == int(value) else _number(value)} {unit}"


def _number(value: float) -> str:
    return format(Decimal(repr(value)), "f")


def _connection(test: values.Connection) -> str:
    timeout = _timeout(test.timeout)
    protocol = test.protocol
    if protocol.credentials or protocol.content:
        login = f"{protocol.credentials}@" if protocol.credentials else ""
        operator = "!=" if protocol.is_negated else "="
        content = f" content {operator} {_string(protocol.content)}" if protocol.content else ""
        return f"failed url http://{login}{test.host}:{test.port}{protocol.request} {content}{timeout}"
    place = f"unixsocket {_path(test.unixsocket)}" if test.unixsocket else f"host {_string(test.host)} port {test.port}"
    kind = " type udp" if test.is_udp else ""
    return f"failed {place}{kind}{_protocol(protocol)}{timeout}"


def _protocol(protocol: values.Protocol) -> str:
    if protocol.name == "generic":
        return "".join(f" {word} {_string(text)}" for word, text in protocol.dialogue)
    if protocol.name == "default":
        return ""
    text = f" protocol {protocol.name}"
    if protocol.request:
        text += f" request {_path(protocol.request)}"
    if protocol.checksum:
        text += f" checksum {_string(protocol.checksum)}"
    if protocol.hostheader:
        text += f" hostheader {_string(protocol.hostheader)}"
    return text


def _timeout(seconds: int) -> str:
    return f" with timeout {seconds} seconds" if seconds != values.NET_TIMEOUT else ""


# --- words ------------------------------------------------------------------------------------------------------------


def _name(name: str) -> str:
    """Format a name as a bare word, or with quotes and escapes."""
    if re.fullmatch(WORD, name):
        return name
    escaped = "".join(
        char if re.fullmatch(WORD, char) and char != "\\" else _ESCAPES.get(char) or _hex(char) for char in name
    )
    return f'"{escaped}"'


def _path(path: str) -> str:
    return f'"{_escaped(path)}"'


def _string(text: str) -> str:
    """Quote a string. A leading ``/`` is escaped, because it would make the string a path."""
    escaped = _escaped(text)
    return f'"{_hex("/")}{escaped[1:]}"' if escaped.startswith("/") else f'"{escaped}"'


def _identity(owner: str) -> str:
    return owner if re.fullmatch("0|[1-9][0-9]*", owner) else _string(owner)


def _argument(word: str) -> str:
    """Format an argument as a bare word, or in single quotes with escapes."""
    return word if _BARE_ARGUMENT.fullmatch(word) else f"'{_escaped(word)}'"


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda match: _ESCAPES.get(match[0]) or _hex(match[0]), text)


def _hex(char: str) -> str:
    """Escape a character below 128, or an undecodable byte."""
    code = ord(char)
    return f"\\0x{code - _SURROGATE if code >= _SURROGATE else code:02x}"
