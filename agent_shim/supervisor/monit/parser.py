"""Parser for the monit 5.2.5 control language. Does no I/O.

The parser was tested against that version of monit and rejects the same input, with two exceptions. It does not check
tests on which the agent does not act, and it does not check anything that depends on the machine, such as name
resolution and the existence of users, groups and files. ``problems`` finds conflicts between several jobs' files.
"""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from agent_shim.core.errors import ConfigError
from agent_shim.supervisor.monit import rules
from agent_shim.supervisor.monit.ast import Check, Connection, Echo, Ignored, Kind, Mode, MonitFile
from agent_shim.supervisor.monit.reader import MonitSyntaxError, Reader
from agent_shim.supervisor.monit.rules import ALL, STATUS, SYSTEM, read_ignore, read_program, read_regex, read_rule

MAX_BYTES: Final = 256 * 1024
"""Maximum size of one file. It is limited because parsing takes more than linear time."""

MAX_MISTAKES: Final = 20
"""Maximum number of problems that an error lists for one file."""

LATER: Final = ("program", "network")
"""Check types that only later versions of monit support."""


def parse(
    text: str,
    *,
    origin: str,
    without_effect: list[Ignored] | None = None,
    read_set: Callable[[Reader], None] | None = None,
) -> MonitFile:
    """Parse a control file. Raises ``ConfigError`` with the errors in all statements, but at most ``MAX_MISTAKES``:
    ``cannot read ORIGIN: line L column C: found X, expected Y; line …``.

    Statements without effect are appended to ``without_effect``, even if the file contains errors. ``read_set`` reads a
    ``set`` statement after its first word (default: ``skip_set``).
    """
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise ConfigError(f"cannot read {origin}: it has more than {MAX_BYTES >> 10} KiB")
    reader = Reader(text)
    outside = [
        (token.start, Ignored(f"include {text[token.start : token.end]}", line=reader.line(token)))
        for token in reader.includes
    ]
    services: dict[str, Check] = {}
    ignored: list[Ignored] = []
    expected = "'check' or 'set'"
    while reader.kind != "END":
        first, token = reader.at, reader.next
        try:
            if token.kind.startswith("check "):
                check = _check(reader, services, ignored)
                services.setdefault(check.name.lower(), check)
            elif token.kind == "set":
                reader.skip()
                (read_set or skip_set)(reader)
                outside.append((token.start, Ignored(reader.written(first), line=reader.line(token))))
                expected = "'check', 'set' or the end of the file"
            else:
                raise reader.error(expected)
        except MonitSyntaxError as exc:
            _recover(reader, first, exc)
    outside.sort(key=lambda found: found[0])
    without_effect = [] if without_effect is None else without_effect
    without_effect += [*(statement for _, statement in outside), *ignored]
    if found := reader.mistakes:
        more = [f"and {len(found) - MAX_MISTAKES} more"] if len(found) > MAX_MISTAKES else []
        raise ConfigError(f"cannot read {origin}: {'; '.join([*found[:MAX_MISTAKES], *more])}")
    return MonitFile(tuple(services.values()), tuple(without_effect), origin)


def skip_set(reader: Reader) -> None:
    """Skip a ``set`` statement, up to the next ``set`` or ``check``. Raises ``MonitSyntaxError`` if it is empty. Such
    statements configure the monit daemon, and no known release contains one.
    """
    first = reader.next
    while reader.kind not in ("set", "END", "BAD") and not reader.kind.startswith("check "):
        reader.skip()
    if reader.kind == "BAD" or reader.next is first:
        raise reader.error("the words of a 'set'")


def _recover(reader: Reader, first: int, exc: MonitSyntaxError) -> None:
    """Record the error in the statement at token ``first``, and continue with the next statement that begins a line."""
    reader.mistakes.append(str(exc))
    if reader.at == first:
        reader.skip()  # otherwise the same statement would be parsed again
    while (kind := reader.kind) not in ("END", "BAD"):
        if reader.begins_line() and (kind == "set" or kind in OPTIONS or kind.startswith("check ")):
            break
        reader.skip()
    if reader.kind == "BAD":  # the rest of the file cannot be interpreted after an unclosed quote
        reader.end()


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(reader: Reader, services: Mapping[str, Check], ignored: list[Ignored]) -> Check:
    """Parse a check. If the head contains an error, return a check without a name, so that errors in the options are
    found too.
    """
    check = Check(cast("Kind", reader.kind.removeprefix("check ")), "", line=reader.line(reader.next))
    first, before = reader.at, len(reader.mistakes)
    try:
        check = _head(reader, services)
    except MonitSyntaxError as exc:
        _recover(reader, first, exc)
    check = _options(reader, check, ignored)
    is_whole = len(reader.mistakes) == before
    # A check of a host must contain a network test, even if the agent does not act on the test.
    has_test = any(isinstance(rule.test, Connection | Echo) for rule in check.rules)
    has_ignored = any(other.service == check.name for other in ignored)
    if is_whole and check.kind == "host" and not has_test and not has_ignored:
        raise reader.error(f"'if failed port' or 'if failed icmp' for the host {check.name}")
    return check


def _head(reader: Reader, services: Mapping[str, Check]) -> Check:
    """Parse a check up to its options. ``services`` are the preceding services, by lower-case name."""
    head = reader.skip()
    token = reader.need("a name of one word", "NAME")
    name = token.value
    if name.startswith("/"):
        raise reader.error("a name that does not begin with '/'", token)
    if other := services.get(name.lower()):
        raise reader.error(f"another name: '{other.name}' is already defined in line {other.line}", token)
    check = Check(cast("Kind", head.kind.removeprefix("check ")), name, line=reader.line(head))
    if check.kind == "system":
        return check
    if check.kind == "host":
        reader.need("'address'", "address")
        return replace(check, address=reader.string("a host name or address"))
    if check.kind != "process":
        reader.need("'path'", "path")
        return replace(check, path=reader.path("a path"))
    if reader.take("match"):
        return replace(check, matching=read_regex(reader, "STRING", "PATH"))
    hint = f" (monit 5.2.5 has no 'check {name}')" if name.lower() in LATER else ""
    reader.need(f"'pidfile' or 'matching'{hint}", "pidfile", "path")  # monit accepts either word
    return replace(check, pidfile=reader.path("a path"))


def _options(reader: Reader, check: Check, ignored: list[Ignored]) -> Check:
    """Parse a check's options, which may occur in any order and any number of times. Options without effect are
    appended to ``ignored``.
    """
    kind = f"check {check.kind}"
    while reader.kind not in ("END", "set") and not reader.kind.startswith("check "):
        first, token = reader.at, reader.next
        try:
            option = OPTIONS.get(token.kind)
            if option is None or check.kind not in option.kinds:
                raise reader.error(f"an option of {kind}, 'check', 'set' or the end of the file")
            before, check = check, option.read(reader, check)
            if check is before:  # the option has no effect
                ignored.append(Ignored(reader.written(first), check.name, reader.line(token)))
        except MonitSyntaxError as exc:
            _recover(reader, first, exc)
    return check


def _start_or_stop(reader: Reader, check: Check) -> Check:
    if reader.kind == "start":
        return replace(check, start=read_program(reader))
    return replace(check, stop=read_program(reader))


def _group(reader: Reader, check: Check) -> Check:
    reader.skip()
    return replace(check, groups=(*check.groups, reader.need("a name of one word", "NAME").value))


def _depends(reader: Reader, check: Check) -> Check:
    reader.skip()
    names = [reader.need("the name of a check, without quotes", "NAME").value]
    while token := reader.take("NAME"):
        names.append(token.value)
    return replace(check, depends=(*check.depends, *names))


def _mode(reader: Reader, check: Check) -> Check:
    reader.skip()
    token = reader.need("'active', 'passive' or 'manual'", "active", "passive", "manual")
    return replace(check, mode=cast("Mode", token.kind))


def _every(reader: Reader, check: Check) -> Check:
    reader.skip()
    token = reader.next
    cycles = reader.number("a number of cycles")
    reader.need("'cycles'", "cycle")
    if cycles < 2:
        raise reader.error("a number of cycles above 1", token)
    return replace(check, every=cycles)


def _alert(reader: Reader, check: Check) -> Check:
    """Parse ``alert ADDRESS [[not] { EVENT... }] [mail-format {...}] [reminder N cycles]``, or ``noalert ADDRESS``.

    The statement has no effect, because alerts go to the Health Monitor.
    """
    if reader.skip().kind == "noalert":
        reader.need("a mail address", "MAIL")
    else:
        skip_alert(reader)
    return check


def skip_alert(reader: Reader) -> str:
    """Parse the rest of an ``alert`` statement. Return the address, and skip everything else."""
    address = reader.need("a mail address", "MAIL").value
    if reader.take("not") or reader.kind == "{":
        _braces(reader, "events")
    if reader.take("mail-format"):
        _braces(reader, "the parts of a mail")
    if reader.take("reminder"):
        reader.number("a number of cycles")
        reader.take("cycle")
    return address


def _braces(reader: Reader, content: str) -> None:
    """Parse a list of arbitrary words in braces."""
    expected = f"'{{', {content} and '}}'"
    reader.need(expected, "{")
    while not reader.take("}"):
        if reader.kind in ("END", "BAD", "{"):
            raise reader.error(expected)
        reader.skip()


def _rule(reader: Reader, check: Check) -> Check:
    """Parse a rule. If it has no effect, return the check unchanged."""
    rule = read_rule(reader, check.kind, check.address or "localhost")
    return replace(check, rules=(*check.rules, rule)) if rule else check


def _ignore(reader: Reader, check: Check) -> Check:
    """Parse ``ignore [not] match``. If the statement has no effect, return the check unchanged."""
    passed_over = read_ignore(reader)
    return replace(check, passed_over=(*check.passed_over, passed_over)) if passed_over else check


class _Option(NamedTuple):
    """A function that reads an option, and the check types that support the option."""

    read: Callable[[Reader, Check], Check]
    kinds: frozenset[str] = ALL


OPTIONS: Final[Mapping[str, _Option]] = {
    "start": _Option(_start_or_stop, ALL - STATUS),
    "stop": _Option(_start_or_stop, ALL - STATUS),
    "group": _Option(_group),
    "depends": _Option(_depends),
    "mode": _Option(_mode, ALL - SYSTEM - STATUS),
    "every": _Option(_every),
    "alert": _Option(_alert),
    "noalert": _Option(_alert),
    "if": _Option(_rule),
    "ignore": _Option(_ignore, rules.FILE),
}


# --- several files ----------------------------------------------------------------------------------------------------


class Problem(msgspec.Struct, frozen=True):
    """A conflict between files. ``service`` is defined at ``origin`` and ``line``.

    ``duplicate`` means that an earlier definition of the service exists. ``missing`` means that the service depends on
    an undefined one. ``cycle`` means that it depends on itself, perhaps indirectly; each cycle is reported for only one
    of its services.
    """

    kind: Literal["duplicate", "missing", "cycle"]
    service: str
    origin: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.origin}: line {self.line}: {self.text}"


def problems(files: Iterable[MonitFile]) -> list[Problem]:
    """Find conflicts between ``files`` that would make monit reject all of them: duplicate services, and missing or
    circular dependencies.
    """
    found: list[Problem] = []
    defined: dict[str, tuple[Check, str]] = {}
    for file in files:
        for check in file.services:
            if other := defined.get(check.name.lower()):
                text = f"'{check.name}' is defined already in {other[1]} line {other[0].line}"
                found.append(Problem("duplicate", check.name, file.origin, check.line, text))
            else:
                defined[check.name.lower()] = check, file.origin
    for check, origin in defined.values():
        for name in check.depends:
            if name.lower() not in defined:
                text = f"'{check.name}' depends on '{name}', which is not defined"
                found.append(Problem("missing", check.name, origin, check.line, text))
    for circle in _dependency_cycles(
        {name: [below.lower() for below in check.depends] for name, (check, _) in defined.items()}
    ):
        check, origin = defined[circle[0]]
        text = "depends on itself: " + " -> ".join(defined[name][0].name for name in [*circle, circle[0]])
        found.append(Problem("cycle", check.name, origin, check.line, text))
    return found


def _dependency_cycles(depends: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Yield each circular dependency as a list of names, in which each service depends on the next. The list begins
    with the service that is defined first. No name is yielded twice.
    """
    remaining = dict(depends)
    while True:
        try:
            graphlib.TopologicalSorter(remaining).prepare()
        except graphlib.CycleError as exc:
            circle = exc.args[1][:0:-1]  # graphlib puts dependencies first, and the same name at both ends
            first = circle.index(min(circle, key=list(depends).index))
            yield circle[first:] + circle[:first]
            remaining = {name: below for name, below in remaining.items() if name not in circle}
        else:
            return
