"""Statements of a monit control file without effect: ``set`` and ``alert``. Pure.

They concern the monit daemon and its mails, which the agent replaces. They are still parsed strictly, because monit
refuses a file with any error in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from agent_shim.supervisor.monit.reader import Reader

EVENTS: Final = (
    "action",
    "checksum",
    "connection",
    "content",
    "data",
    "exec",
    "fsflag",
    "gid",
    "icmp",
    "instance",
    "invalid",
    "nonexist",
    "permission",
    "pid",
    "ppid",
    "resource",
    "size",
    "timeout",
    "timestamp",
    "uid",
)
"""Events of mail alerts."""

FACILITIES: Final = frozenset({"log_daemon", *(f"log_local{number}" for number in range(8))})

UNITS: Final[Mapping[str, int]] = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def read_set(reader: Reader) -> None:
    """Parse a ``set`` statement."""
    reader.skip()
    subject = reader.next
    if subject.kind not in _SETTINGS:
        raise reader.error(f"one of {', '.join(_SETTINGS)} after 'set'")
    if subject.kind != "alert":
        reader.skip()
    _SETTINGS[subject.kind](reader)


def read_alert(reader: Reader) -> None:
    """Parse ``alert ADDRESS [[not] { EVENT... }] [mail-format {...}] [reminder N cycles]``, or ``noalert ADDRESS``."""
    is_silent = reader.skip().kind == "noalert"
    reader.need("a mail address", "MAIL")
    if is_silent:
        return
    if reader.take("not") or reader.kind == "{":
        reader.need("'{' and events", "{")
        _until_brace(reader, f"an event ({', '.join(EVENTS)})", *EVENTS)
    if reader.take("mail-format"):
        _mail_format(reader)
    if reader.take("reminder"):
        reader.number("a number of cycles")
        reader.take("cycle")


def _mail_format(reader: Reader) -> None:
    reader.need("'{'", "{")
    _until_brace(reader, "'from:', 'reply-to:', 'subject:' or 'message:'", "FROM", "REPLY-TO", "SUBJECT", "MESSAGE")


def _until_brace(reader: Reader, expected: str, *kinds: str) -> None:
    """Parse one or more words of these kinds, then the closing brace."""
    reader.need(expected, *kinds)
    while not reader.take("}"):
        reader.need(f"{expected} or '}}'", *kinds)


def _nothing(reader: Reader) -> None:
    """Parse nothing: the word alone is the statement."""


def _daemon(reader: Reader) -> None:
    token = reader.next
    if not reader.number("a number of seconds"):
        raise reader.error("a number of seconds above 0", token)
    if reader.take("start"):
        reader.need("'delay'", "delay")
        reader.number("a number of seconds")


def _logfile(reader: Reader) -> None:
    if not reader.take("syslog"):
        reader.path("'syslog' or a path")
    elif reader.take("facility"):
        facility = reader.need("a facility", "STRING")
        if facility.value.lower() not in FACILITIES:
            raise reader.error(f"one of {', '.join(sorted(FACILITIES))}", facility)


def _eventqueue(reader: Reader) -> None:
    if reader.take("basedir"):
        reader.path("a directory")
        if not reader.take("slot"):
            return
    else:
        reader.need("'basedir' or 'slots'", "slot")
    reader.number("a number of slots")


def _a_path(reader: Reader) -> None:
    reader.path("a path")


def _expectbuffer(reader: Reader) -> None:
    reader.number("a size")
    reader.take(*UNITS)


def _mailserver(reader: Reader) -> None:
    reader.string("a host name")
    while True:
        if reader.take("port"):
            reader.number("a port")
        if reader.take("username"):
            reader.need("a user name", "MAIL", "STRING")
        if reader.take("password"):
            reader.string("a password")
        _tls(reader)
        if not reader.take("STRING"):
            break
    reader.timeout(0)
    if reader.take("hostname"):
        reader.string("a host name")


def _mmonit(reader: Reader) -> None:
    reader.url()
    while True:
        reader.timeout(0)
        _tls(reader)
        if reader.take("register"):
            reader.need("'credentials'", "credentials")
        if reader.kind != "URL":
            break
        reader.url()


def _tls(reader: Reader) -> None:
    reader.take("sslv2", "sslv3", "tlsv1", "sslauto")
    if reader.take("certmd5"):
        reader.string("a checksum")


def _httpd(reader: Reader) -> None:
    reader.need("'port'", "port")
    reader.number("a port")
    while reader.kind in ("ssl", "enable", "disable", "signature", "address", "allow"):
        if reader.take("allow"):
            _allow(reader)
        elif reader.take("address"):
            reader.string("an address")
        else:
            _switch(reader)


def _switch(reader: Reader) -> None:
    """Parse a switch; ``ssl`` can only be disabled, since monit on a BOSH machine lacks it."""
    subject = reader.take("ssl", "signature")
    switch = reader.need("'enable' or 'disable'", "enable", "disable")
    subject = subject or reader.need("'ssl' or 'signature'", "ssl", "signature")
    if subject.kind == "signature":
        return
    if switch.kind == "enable":
        raise reader.error("'ssl disable': monit on a BOSH machine has no TLS", subject)
    while option := reader.take("pemfile", "clientpemfile", "allowselfcertification"):
        if option.kind != "allowselfcertification":
            reader.path("a path")


def _allow(reader: Reader) -> None:
    """Parse ``USER:PASSWORD``, ``@GROUP``, a network or host, or the users of a password file."""
    if reader.take("@"):
        reader.string("a group")
        reader.take("readonly")
    elif reader.take("STRING"):
        if reader.take(":"):
            reader.string("a password")
            reader.take("readonly")
    else:
        reader.take("cleartext", "md5", "crypt")
        reader.path("a user, a network or a password file")
        while reader.take("STRING"):
            pass


_SETTINGS: Final[Mapping[str, Callable[[Reader], None]]] = {
    "alert": read_alert,
    "daemon": _daemon,
    "eventqueue": _eventqueue,
    "expectbuffer": _expectbuffer,
    "fips": _nothing,
    "httpd": _httpd,
    "idfile": _a_path,
    "init": _nothing,
    "logfile": _logfile,
    "mail-format": _mail_format,
    "mailserver": _mailserver,
    "mmonit": _mmonit,
    "pidfile": _a_path,
    "statefile": _a_path,
}
