"""Defines the values that represent a parsed monit control file.

A rule reads ``if TEST for RATE then ACTION else if succeeded for RATE then ACTION``. Positions (``line``) are ignored
in comparisons, so that files with the same content are equal.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["process", "file", "filesystem", "directory", "fifo", "host", "system", "status"]
Mode: TypeAlias = Literal["active", "passive", "manual"]
Operator: TypeAlias = Literal[">", "<", "=", "!="]
Algorithm: TypeAlias = Literal["md5", "sha1"]
ActionKind: TypeAlias = Literal["alert", "restart", "start", "stop", "unmonitor", "exec", "ignore"]

START_TIMEOUT: Final = 30
NET_TIMEOUT: Final = 5
ECHO_COUNT: Final = 3


class MonitProgram(msgspec.Struct, frozen=True):
    """A command that is run without a shell. ``uid`` and ``gid`` are names or numbers ("" means root), and ``timeout``
    is in seconds.
    """

    argv: tuple[str, ...]
    uid: str = ""
    gid: str = ""
    timeout: int = START_TIMEOUT


class Action(msgspec.Struct, frozen=True):
    """A rule's action. Only ``exec`` has a ``program``. ``ignore`` does nothing; it is used internally and cannot be
    written in a control file.
    """

    kind: ActionKind
    program: MonitProgram | None = None


ALERT: Final = Action("alert")
IGNORE: Final = Action("ignore")


class Rate(msgspec.Struct, frozen=True):
    """A rule acts if ``count`` of the last ``cycles`` checks had the same result. ``cycles`` is at most 64."""

    count: int = 1
    cycles: int = 1


ONCE: Final = Rate()


class Missing(msgspec.Struct, frozen=True):
    """The checked path does not exist, or the checked process is not running. A rule with this test replaces monit's
    default rule, which restarts the service.
    """


class PidChanged(msgspec.Struct, frozen=True):
    """The process is not the same as at the last check."""


class Restarts(msgspec.Struct, frozen=True):
    """The service was restarted ``count`` times within ``cycles`` checks."""

    count: int
    cycles: int


class Limit(msgspec.Struct, frozen=True):
    """Comparison of a metric with a limit, which is a percentage, a number of bytes or a plain number.

    A process has the metrics ``cpu``, ``totalcpu``, ``memory``, ``totalmemory`` and ``children``. The system has
    ``memory``, ``swap``, ``cpu user``, ``cpu system`` and ``cpu wait``. Both also have ``loadavg1``, ``loadavg5`` and
    ``loadavg15``. A file system has ``space`` and ``inode``, a file has ``size``, and a path has ``timestamp``, which
    is the path's age in seconds.
    """

    metric: str
    operator: Operator
    limit: float
    percent: bool = False


class Changed(msgspec.Struct, frozen=True):
    """A value has changed since the last check. ``algorithm`` is set for checksums."""

    what: Literal["checksum", "fsflag", "ppid", "size", "timestamp"]
    algorithm: Algorithm = "md5"


class Unlike(msgspec.Struct, frozen=True):
    """A value differs from the expected one, which is a mode in octal digits, an owner, or a checksum. An expected
    checksum of "" stands for the checksum at the first check.
    """

    what: Literal["checksum", "gid", "permission", "uid"]
    value: str = ""
    algorithm: Algorithm = "md5"


class Match(msgspec.Struct, frozen=True):
    """A new line in a file matches ``pattern``, or does not match it if ``is_negated``."""

    pattern: str
    is_negated: bool = False


class WrongType(msgspec.Struct, frozen=True):
    """The path does not have the type of the check (file, directory or fifo). monit adds this test to every such check.
    It cannot be written in a control file.
    """


class Unreadable(msgspec.Struct, frozen=True):
    """The path exists but cannot be examined. monit adds this test to every check of a path. It cannot be written in a
    control file.
    """


class Echo(msgspec.Struct, frozen=True):
    """None of ``count`` echo requests (ICMP) was answered within ``timeout`` seconds."""

    count: int = ECHO_COUNT
    timeout: int = NET_TIMEOUT


class Protocol(msgspec.Struct, frozen=True):
    """The protocol of a connection test. ``name`` is monit's name for the protocol. The ``default`` protocol only
    connects, and ``generic`` carries out the ``send`` and ``expect`` steps in ``dialogue``.

    A ``send`` string may contain ``\\0xHH`` for bytes, including zero. The remaining fields apply only to http.
    ``checksum`` is the expected checksum of the page. ``content`` is a regular expression that the page must match, or
    must not match if ``is_negated``. ``credentials`` are a user and a password.
    """

    name: str = "default"
    request: str = ""
    hostheader: str = ""
    checksum: str = ""
    content: str = ""
    is_negated: bool = False
    credentials: str = ""
    dialogue: tuple[tuple[Literal["send", "expect"], str], ...] = ()


class Connection(msgspec.Struct, frozen=True):
    """The server at ``host`` and ``port``, or at ``unixsocket``, does not respond within ``timeout`` seconds."""

    host: str = ""
    port: int = 0
    unixsocket: str = ""
    protocol: Protocol = Protocol()
    timeout: int = NET_TIMEOUT
    is_udp: bool = False


Test: TypeAlias = (
    Missing | PidChanged | Restarts | Limit | Changed | Unlike | Match | WrongType | Unreadable | Echo | Connection
)
CHANGES: Final = (Changed, Match, PidChanged)
"""Tests that detect an event instead of a state. Each event counts as a failure. If the next check finds no event, that
is not reported as a recovery.
"""


class _Placed(msgspec.Struct, frozen=True, eq=False):
    """A value whose last field is its position. Comparisons ignore that field."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _content(self) == _content(other)

    def __hash__(self) -> int:
        return hash(_content(self))


def _content(value: msgspec.Struct) -> tuple[object, ...]:
    """Return all fields except the last, which is the line number."""
    return msgspec.structs.astuple(value)[:-1]


class Rule(_Placed, frozen=True):
    """A test and its actions."""

    test: Test
    action: Action
    rate: Rate = ONCE
    recovery: Action = ALERT
    recovery_rate: Rate = ONCE
    line: int = 0


class Check(_Placed, frozen=True):
    """One ``check`` statement, which monit calls a service.

    A process is identified by its ``pidfile`` or by ``matching``, a regular expression for its command line. A host has
    an ``address``, and a system has none of these. All other kinds have a ``path``. Names, groups and dependencies are
    not case-sensitive. ``every`` is a number of cycles.
    """

    kind: Kind
    name: str
    pidfile: str = ""
    matching: str = ""
    path: str = ""
    address: str = ""
    start: MonitProgram | None = None
    stop: MonitProgram | None = None
    groups: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    mode: Mode = "active"
    every: int = 1
    rules: tuple[Rule, ...] = ()
    passed_over: tuple[Match, ...] = ()
    """Patterns from ``ignore match`` statements. ``if match`` rules ignore lines that match one of these patterns."""
    line: int = 0


class Ignored(_Placed, frozen=True):
    """A statement without effect: ``set`` or ``include``, or an ``alert`` or rule in the check named ``service``."""

    statement: str
    service: str = ""
    line: int = 0

    @property
    def first_words(self) -> str:
        """The first words, which identify the statement, such as ``set daemon`` or ``if failed port``. The rest may be
        secret.
        """
        words = self.statement.split()
        return " ".join(words[: 3 if words[1].lower() in ("changed", "failed", "not") else 2])


class JobFile(msgspec.Struct, frozen=True):
    """A job's monit file. ``name`` is "" for the file ``monit``, and "x" for ``x.monit``."""

    job: str
    name: str
    text: str


class MonitFile(_Placed, frozen=True):
    """A parsed control file. In ``ignored``, the statements outside of checks come first."""

    services: tuple[Check, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    origin: str = ""
