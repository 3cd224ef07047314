"""Values of a monit control file. Pure.

A rule reads ``if TEST for RATE then ACTION else if succeeded for RATE then ACTION``. Positions (``line``) do not count
in comparisons: files with the same content are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["process", "file", "filesystem", "directory", "fifo", "host", "system", "status"]
Mode: TypeAlias = Literal["active", "passive", "manual"]
Operator: TypeAlias = Literal[">", "<", "=", "!="]
Change: TypeAlias = Literal["pid", "ppid", "checksum", "timestamp", "size", "fsflag"]
ActionKind: TypeAlias = Literal["alert", "restart", "start", "stop", "unmonitor", "exec", "ignore"]

START_TIMEOUT: Final = 30
NET_TIMEOUT: Final = 5
PING_COUNT: Final = 3
MAX_FORWARD: Final = 70


class Program(msgspec.Struct, frozen=True):
    """A command without a shell; ``uid`` and ``gid`` are names or numbers, "" is root; ``timeout`` is in seconds."""

    argv: tuple[str, ...]
    uid: str = ""
    gid: str = ""
    timeout: int = START_TIMEOUT


class Action(msgspec.Struct, frozen=True):
    """An action; ``program`` belongs to ``exec``. ``ignore`` has no effect and no syntax."""

    kind: ActionKind
    program: Program | None = None


ALERT: Final = Action("alert")
IGNORE: Final = Action("ignore")


class Rate(msgspec.Struct, frozen=True):
    """``count`` of the last ``cycles`` checks, at most 64."""

    count: int = 1
    cycles: int = 1


ONCE: Final = Rate()


class Missing(msgspec.Struct, frozen=True):
    """The subject does not exist; a process does not run. Replaces the built-in restart."""


class Changed(msgspec.Struct, frozen=True):
    """Differs from the last check; ``algorithm`` (``md5``, ``sha1``, "" for monit's choice) belongs to a checksum."""

    what: Change
    algorithm: str = ""


class Restarts(msgspec.Struct, frozen=True):
    """Restarted ``count`` times within ``cycles`` checks."""

    count: int
    cycles: int


class Limit(msgspec.Struct, frozen=True):
    """Comparison with a limit in percent, bytes, seconds (``timestamp``: the age) or a plain number.

    Metrics: of a process ``cpu totalcpu memory totalmemory children``; of any check ``loadavg1 loadavg5 loadavg15``; of
    the system ``memory swap`` and ``cpu user``, ``cpu system``, ``cpu wait``; of a file system ``space inode``; of a
    file ``size timestamp``; of an Apache the names ending in ``limit``.
    """

    metric: str
    operator: Operator
    limit: float
    percent: bool = False


class Protocol(msgspec.Struct, frozen=True):
    """Protocol of a connection: a name of monit, ``default`` (connect only) or ``generic`` (the ``dialogue``).

    ``request``, ``checksum`` (md5 or sha1 in hexadecimal) and ``hostheader`` belong to http; ``content`` is a regular
    expression that the page must match (``=``) or must not (``!=``); ``target`` and ``maxforward`` belong to sip,
    ``secret`` to radius, ``limits`` to apache-status. A ``send`` text may contain ``\\0xHH`` for bytes, including zero.
    """

    name: str = "default"
    request: str = ""
    checksum: str = ""
    hostheader: str = ""
    content: str = ""
    content_operator: Operator = "="
    target: str = ""
    maxforward: int = MAX_FORWARD
    secret: str = ""
    limits: tuple[Limit, ...] = ()
    dialogue: tuple[tuple[Literal["send", "expect"], str], ...] = ()


class Connection(msgspec.Struct, frozen=True):
    """No answer at ``host`` and ``port``, or at ``unixsocket``, within ``timeout`` seconds."""

    host: str = ""
    port: int = 0
    unixsocket: str = ""
    type: Literal["tcp", "udp"] = "tcp"
    protocol: Protocol = Protocol()
    timeout: int = NET_TIMEOUT
    url: str = ""


class Ping(msgspec.Struct, frozen=True):
    """None of ``count`` echo requests is answered within ``timeout`` seconds."""

    count: int = PING_COUNT
    timeout: int = NET_TIMEOUT


class Checksum(msgspec.Struct, frozen=True):
    """Differs from ``expected`` (lower-case hexadecimal), or without it from the sum at the start."""

    algorithm: str = ""
    expected: str = ""


class Permission(msgspec.Struct, frozen=True):
    """The mode bits are not these."""

    mode: int


class Owner(msgspec.Struct, frozen=True):
    """The owner (``uid``) or group (``gid``) is not ``name``, a name or a number."""

    what: Literal["uid", "gid"]
    name: str


class Match(msgspec.Struct, frozen=True):
    """A new line of the file matches ``pattern`` (or one in the file ``path``), or does not (``negated``).

    The action ``ignore`` skips such lines.
    """

    pattern: str = ""
    path: str = ""
    negated: bool = False


Test: TypeAlias = Missing | Changed | Restarts | Limit | Connection | Ping | Checksum | Permission | Owner | Match


@dataclass(frozen=True, slots=True)
class Rule:
    """A test and its actions."""

    test: Test
    action: Action
    rate: Rate = ONCE
    recovery: Action = ALERT
    recovery_rate: Rate = ONCE
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Check:
    """One ``check`` statement, a service in monit's terms.

    A process has a ``pidfile`` or ``matching``, a regular expression for its command line; a host has an ``address``; a
    system has nothing; the others have a ``path``. Names, groups and dependencies are case-insensitive. It is checked
    every ``every`` cycles.
    """

    kind: Kind
    name: str
    pidfile: str = ""
    matching: str = ""
    path: str = ""
    address: str = ""
    start: Program | None = None
    stop: Program | None = None
    groups: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    mode: Mode = "active"
    every: int = 1
    rules: tuple[Rule, ...] = ()
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Ignored:
    """A statement without effect: ``set``, ``include``, and ``alert`` in the check named ``service``."""

    statement: str
    service: str = ""
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class MonitFile:
    """A control file; ``ignored`` lists the statements outside checks first."""

    services: tuple[Check, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    origin: str = field(default="", compare=False)
