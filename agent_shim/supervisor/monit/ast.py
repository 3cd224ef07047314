"""What a monit control file says, as values. Pure.

A rule reads ``if TEST for RATE then ACTION else if succeeded for RATE then ACTION``. Where something stood (``line``)
is no part of what it says: two files that say the same are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["process", "file", "filesystem", "directory", "fifo", "host", "system", "status"]
Mode: TypeAlias = Literal["active", "passive", "manual"]
Operator: TypeAlias = Literal[">", "<", "=", "!="]
Change: TypeAlias = Literal["pid", "ppid", "checksum", "timestamp", "size", "fsflag"]
ActionKind: TypeAlias = Literal["alert", "restart", "start", "stop", "unmonitor", "exec", "ignore"]

START_TIMEOUT: Final = 30
NET_TIMEOUT: Final = 5
PING_COUNT: Final = 3
MAX_FORWARD: Final = 70


@dataclass(frozen=True, slots=True)
class Program:
    """What to run, without a shell; ``uid`` and ``gid`` are names or numbers, "" is root; ``timeout`` is in seconds."""

    argv: tuple[str, ...]
    uid: str = ""
    gid: str = ""
    timeout: int = START_TIMEOUT


@dataclass(frozen=True, slots=True)
class Action:
    """What to do; ``program`` belongs to ``exec``. ``ignore`` does nothing and cannot be written."""

    kind: ActionKind
    program: Program | None = None


ALERT: Final = Action("alert")
IGNORE: Final = Action("ignore")


@dataclass(frozen=True, slots=True)
class Rate:
    """``count`` of the last ``cycles`` checks, 64 at most."""

    count: int = 1
    cycles: int = 1


ONCE: Final = Rate()


@dataclass(frozen=True, slots=True)
class Missing:
    """It does not exist; for a process: it does not run. Takes the place of the built-in restart."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Differs from the last check; ``algorithm`` (``md5``, ``sha1``, "" for monit's choice) belongs to a checksum."""

    what: Change
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class Restarts:
    """Restarted ``count`` times within ``cycles`` checks."""

    count: int
    cycles: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure compared with a limit, which is in percent, bytes, seconds (``timestamp``: the age) or a plain number.

    Metrics: of a process ``cpu totalcpu memory totalmemory children``; of any ``loadavg1 loadavg5 loadavg15``; of the
    system ``memory swap`` and ``cpu user``, ``cpu system``, ``cpu wait``; of a file system ``space inode``; of a file
    ``size timestamp``; of an Apache the names that end in ``limit``.
    """

    metric: str
    operator: Operator
    limit: float
    percent: bool = False


@dataclass(frozen=True, slots=True)
class Protocol:
    """How to talk to what listens: a name of monit, ``default`` (connect only) or ``generic`` (the ``dialogue``).

    ``request``, ``checksum`` (md5 or sha1 in hexadecimal) and ``hostheader`` belong to http; ``content`` is a regular
    expression that the page must match (``=``) or must not (``!=``); ``target`` and ``maxforward`` belong to sip,
    ``secret`` to radius, ``limits`` to apache-status. A ``send`` text may hold ``\\0xHH`` for bytes, also zero.
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


@dataclass(frozen=True, slots=True)
class Connection:
    """Nobody answers at ``host`` and ``port``, or at ``unixsocket``, within ``timeout`` seconds."""

    host: str = ""
    port: int = 0
    unixsocket: str = ""
    type: Literal["tcp", "udp"] = "tcp"
    protocol: Protocol = Protocol()
    timeout: int = NET_TIMEOUT
    url: str = ""


@dataclass(frozen=True, slots=True)
class Ping:
    """None of ``count`` echo requests is answered within ``timeout`` seconds."""

    count: int = PING_COUNT
    timeout: int = NET_TIMEOUT


@dataclass(frozen=True, slots=True)
class Checksum:
    """Differs from ``expected`` (lower-case hexadecimal), or from the sum at the start where none is given."""

    algorithm: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True)
class Permission:
    """The mode bits are not these."""

    mode: int


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner (``uid``) or group (``gid``) is not ``name``, a name or a number."""

    what: Literal["uid", "gid"]
    name: str


@dataclass(frozen=True, slots=True)
class Match:
    """A new line of the file matches ``pattern`` (or one that stands in the file ``path``), or does not (``negated``).

    Together with the action ``ignore`` such lines are skipped.
    """

    pattern: str = ""
    path: str = ""
    negated: bool = False


Test: TypeAlias = Missing | Changed | Restarts | Limit | Connection | Ping | Checksum | Permission | Owner | Match


@dataclass(frozen=True, slots=True)
class Rule:
    """A test and what follows from it."""

    test: Test
    action: Action
    rate: Rate = ONCE
    recovery: Action = ALERT
    recovery_rate: Rate = ONCE
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Check:
    """One ``check`` statement: what monit calls a service.

    A process has a ``pidfile`` or ``matching``, a regular expression for its command line; a host has an ``address``;
    a system has nothing; the others have a ``path``. Names, groups and dependencies are compared without case.
    ``every`` says at which cycle it is looked at: 1 is each.
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
    """A statement that is read and not acted on: ``set``, ``include``, and ``alert`` in the check named ``service``."""

    statement: str
    service: str = ""
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class MonitFile:
    """A control file; ``ignored`` has the statements outside checks first."""

    services: tuple[Check, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    origin: str = field(default="", compare=False)
