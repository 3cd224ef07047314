"""Reads monit's control file (``/var/vcap/bosh/etc/monitrc`` on a stemcell) for a daemon that replaces monit.

The parser understands monit 5.2.5's statements (``p.y``) and reads included files in the same order as monit,
from the last name to the first (``include_file`` in ``l.l``). If there is an error in the control file itself, the
daemon exits, as monit does. An error in an included file, which may come from a release, affects only the services in
that file, or only the invalid ``set`` statement.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import pwd
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core.errors import ConfigError
from agent_shim.host import files
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import JobFile
from agent_shim.supervisor.monit.reader import Reader

logger = logging.getLogger(__name__)

MAX_DEPTH: Final = 8
"""Maximum depth of includes. Deeper includes are ignored. monit allows ten."""
_NUMBERED: Final = re.compile(r"[0-9]{4}_(?=.)")
"""Matches the number that the Go agent puts before a job's name (applier/jobs/rendered_job_applier.go)."""


class Control(msgspec.Struct):
    """Values of the ``set`` statements, with monit's defaults. ``job_files`` are all files that may contain checks."""

    path: Path
    pidfile: Path = Path()
    idfile: Path = Path()
    statefile: Path = Path()
    poll: int = 30
    """Length of a cycle in seconds."""
    start_delay: int = 0
    logfile: Path | None = None
    address: str = ""
    port: int = 0
    """Port of the HTTP interface, or 0 if there is none."""
    users: dict[str, bool] = msgspec.field(default_factory=dict)
    """Maps ``user:password`` to whether this user may change services."""
    user_files: list[tuple[Path, frozenset[str], bool]] = msgspec.field(default_factory=list)
    """Files with lines ``user:password``, the users to read from each (all if empty), and whether they may change
    services.
    """
    allows_neighbours: bool = False
    """True if any program on this machine may send requests without a password."""
    mail_servers: list[tuple[str, int]] = msgspec.field(default_factory=list)
    mail_timeout: int = 5
    mail_format: dict[str, str] = msgspec.field(default_factory=dict)
    """Templates for ``from``, ``reply-to``, ``subject`` and ``message``."""
    recipients: list[str] = msgspec.field(default_factory=list)
    queue: Path | None = None
    """Directory for messages that could not be sent yet."""
    slots: int = 0
    """Maximum number of messages in ``queue``. 0, monit's default, means no limit."""
    job_files: list[JobFile] = msgspec.field(default_factory=list)

    def credentials(self) -> Mapping[bytes, bool] | None:
        """Return a map from ``user:password`` to whether the user may change services. Return None if no password is
        needed, because the file allows local clients and names no users.

        Raises ``OSError`` if a password file cannot be read.
        """
        if self.allows_neighbours and not self.users and not self.user_files:
            return None
        found = {text.encode(): may_act for text, may_act in self.users.items()}
        for path, names, may_act in self.user_files:
            for line in files.read(path).split(b"\n"):
                user, colon, _ = line.strip().partition(b":")
                if colon and (not names or user.decode(errors="replace") in names):
                    found[line.strip()] = may_act
        return found


def read(path: Path) -> Control:
    """Read the control file and all included files. Raises a ``ConfigError`` that names the line if there is an error
    in the control file itself. Errors in included files are only logged. Blocks.
    """
    is_root, home = os.geteuid() == 0, Path(pwd.getpwuid(os.geteuid()).pw_dir)
    pidfile = Path("/var/run/monit.pid") if is_root else home / ".monit.pid"
    control = Control(path, pidfile, home / ".monit.id", home / ".monit.state")
    _take(control, path, depth=0)
    return control


def _take(control: Control, path: Path, depth: int) -> None:
    """Add the content of a file, and of the files that it includes, to ``control``. ``depth`` is 0 for the control file
    itself. Files with errors are added to ``job_files`` too, so that the supervisor reports them as failing services.
    """
    try:
        text = files.read(path).decode("utf-8", "surrogateescape")
    except OSError as exc:
        _complain(ConfigError(f"cannot read {path}: {exc.strerror}"), depth)
        return
    try:
        parser.parse(text, origin=str(path), read_set=partial(_set, control))
    except ConfigError as exc:
        _complain(exc, depth)
    control.job_files.append(JobFile(_NUMBERED.sub("", path.stem, count=1), "", text))
    for token in Reader(text).includes if depth < MAX_DEPTH else ():
        pattern = token.value.strip("\"'")
        # As in monit, relative patterns start at the root directory.
        for found in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True):
            _take(control, found, depth + 1)


def _complain(error: ConfigError, depth: int) -> None:
    """Raise an error in the control file itself, or log an error in an included file."""
    if depth == 0:
        raise error
    logger.error("%s", error)


def _set(control: Control, reader: Reader) -> None:
    """Read the rest of a ``set`` statement, and store its values in ``control``. A statement that this module does not
    interpret is skipped with a warning.
    """
    word = reader.next.kind
    if word in _FILES:  # the attribute of ``Control`` has the same name
        reader.skip()
        is_syslog = word == "logfile" and reader.take("syslog")  # the daemon logs to stderr instead
        setattr(control, word, None if is_syslog else Path(reader.path("a path")))
    elif read_statement := _STATEMENTS.get(word):
        reader.skip()
        read_statement(control, reader)
    else:
        parser.skip_set(reader)
        logger.warning("not acted on: set %s", word)


def _daemon(control: Control, reader: Reader) -> None:
    """Read ``N [with start delay M]``, in seconds."""
    control.poll = max(1, reader.number("a number of seconds"))
    if reader.take("start"):
        reader.need("'delay'", "delay")
        control.start_delay = reader.number("a number of seconds")


def _mail_servers(control: Control, reader: Reader) -> None:
    """Read ``HOST [port N]``, repeated, and ``[with timeout N seconds]``. Raises ``MonitSyntaxError`` for a server with
    a password or TLS, which ``edges.mail`` does not support.
    """
    while token := reader.take("STRING"):
        port = reader.number("a port") if reader.take("port") else 25
        if reader.kind in ("username", "password", "sslauto", "sslv2", "sslv3", "tlsv1"):
            raise reader.error("a mail server without password and TLS")
        control.mail_servers.append((token.value, port))
    control.mail_timeout = reader.timeout(5)


def _mail_format(control: Control, reader: Reader) -> None:
    """Read ``{ from: … subject: … message: … }``."""
    reader.need("'{'", "{")
    while not reader.take("}"):
        token = reader.need("a part of a mail, or '}'", "FROM", "REPLY-TO", "SUBJECT", "MESSAGE")
        control.mail_format[token.kind.lower()] = token.value


def _queue(control: Control, reader: Reader) -> None:
    """Read ``basedir PATH slots N``."""
    while token := reader.take("basedir", "slot"):
        if token.kind == "basedir":
            control.queue = Path(reader.path("a directory"))
        else:
            control.slots = reader.number("a number of events")


def _httpd(control: Control, reader: Reader) -> None:
    """Read ``port 2822 and use address 127.0.0.1 allow …``. Other words (``signature``, ``enable``, ``disable``) are
    ignored.
    """
    while token := reader.take("port", "address", "allow", "signature", "enable", "disable"):
        match token.kind:
            case "port":
                control.port = reader.number("a port")
            case "address":
                control.address = reader.string("an address")
            case "allow":
                _allow(control, reader)
    if not control.port:
        raise reader.error("'port'")


def _allow(control: Control, reader: Reader) -> None:
    """Read ``user:password [readonly]``, ``cleartext FILE user… [readonly]`` or a loopback address. Raises
    ``MonitSyntaxError`` for any other address, because the daemon does not check the addresses of its clients.
    """
    if reader.take("cleartext"):
        path, names = Path(reader.path("a file of passwords")), set()
        while token := reader.take("STRING"):
            names.add(token.value)
        control.user_files.append((path, frozenset(names), not reader.take("readonly")))
        return
    expected = "USER:PASSWORD, 'cleartext' or an address of this machine"
    token = reader.need(expected, "STRING")
    if reader.take(":"):
        if reader.kind == "BAD":
            raise reader.error("a password", token)
        word = reader.skip()
        password = word.value or reader.text[word.start : word.end]  # a keyword has no value, but may be a password
        control.users[f"{token.value}:{password}"] = not reader.take("readonly")
        return
    is_local = token.value == "localhost"
    with suppress(ValueError):
        is_local = is_local or ipaddress.ip_network(token.value).is_loopback
    if not is_local:
        raise reader.error(expected, token)
    control.allows_neighbours = True


_STATEMENTS: Final[Mapping[str, Callable[[Control, Reader], None]]] = {
    "daemon": _daemon,
    "httpd": _httpd,
    "mailserver": _mail_servers,
    "mail-format": _mail_format,
    "alert": lambda control, reader: control.recipients.append(parser.skip_alert(reader)),
    "eventqueue": _queue,
}
"""Functions that read the rest of a ``set`` statement, by the word after ``set``."""

_FILES: Final = ("pidfile", "idfile", "statefile", "logfile")

ACTED_ON: Final = frozenset({"include"} | {f"set {word}" for word in (*_FILES, *_STATEMENTS)})
"""The first words of the statements that this module interprets."""
