"""Lexer for monit control files. Does no I/O.

Follows monit 5.2.5, the version on every BOSH machine, and was tested against it. The longest match wins. If several
matches have the same length, the first one wins. Some keywords change the rules for the next token: ``check`` is
followed by a name, and ``start "`` by a program's arguments. Because the parser does not influence these rules, the
input can be tokenized completely before it is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias


class Token(NamedTuple):
    """One token. ``start`` and ``end`` are offsets into the text.

    ``kind`` is a keyword in canonical spelling, a kind of value (``STRING PATH NUMBER REAL MAIL NAME URL INCLUDE FROM
    REPLY-TO SUBJECT MESSAGE``), ``END`` at the end of the text, or ``BAD``. The kind of any other character is the
    character itself. ``value`` is the text of a value without quotes and escapes, or a description of what is wrong
    with a ``BAD`` token.
    """

    kind: str
    value: str
    start: int
    end: int


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NOISE: Final = _words(
    "is as are for on only with within without program programs and has using use the sum than usage was times but of"
    " does"
)
"""Noise words, which are ignored everywhere."""

KEYWORDS: Final = _words(
    "if or then else not failed changed recovered passed succeeded set enable disable ignore default daemon delay"
    " logfile syslog facility httpd address clientpemfile allowselfcertification certmd5 pemfile init allow readonly"
    " pidfile idfile statefile path start stop port unixsocket type protocol tcp tcpssl udp alert noalert mail-format"
    " resource restart cycle timeout checksum mailserver every host hostheader system hostname username password"
    " credentials register fips http apache-status ftp smtp postfix-policy pop imap clamav dns mysql nntp ntp3 ssh dwp"
    " ldap2 ldap3 rdate lmtp rsync tns pgsql sip gps radius memcache target maxforward mode active passive manual uid"
    " gid request secret loglimit closelimit dnslimit keepalivelimit replylimit requestlimit startlimit waitlimit"
    " gracefullimit cleanuplimit memory totalmemory swap cpu totalcpu children timestamp second minute hour day sslv2"
    " sslv3 tlsv1 sslauto inode space permission exec size basedir slot eventqueue match connection unmonitor action"
    " icmp echo send expect expectbuffer cleartext md5 sha1 crypt signature nonexist exist invalid data mmonit url"
    " content pid ppid count reminder instance fsflag ssl include b kb mb gb > < = !="
)

SYNONYMS: Final[Mapping[str, str]] = dict(
    pair.split("/")
    for pair in _words(
        "read-only/readonly portnumber/port unix/unixsocket proto/protocol restarts/restart cycles/cycle mem/memory"
        " totalmem/totalmemory seconds/second minutes/minute hours/hour days/day inodes/inode perm/permission"
        " execute/exec slots/slot matching/match fsflags/fsflag byte/b kilobyte/kb megabyte/mb gigabyte/gb percent/%"
        " greater/> gt/> less/< lt/< equal/= eq/= ==/= notequal/!= ne/!="
    )
)

_KINDS: Final[Mapping[str, str]] = {**dict.fromkeys(NOISE, ""), **{word: word for word in KEYWORDS}, **SYNONYMS}
"""Maps each keyword, synonym and noise word, in lower case, to its token kind, which is "" for a noise word."""

WORD: Final = r"""[^\x00-\x21@:{}"';(),%]+"""
"""Matches a word, which ends at blanks, control characters, ``!`` and the characters listed here, but not at ``#``."""

URL: Final = (
    r"(?P<scheme>[a-z0-9]+)://(?:(?P<credentials>[^:@ ]+:[^@ \t\r\n]+)@)?(?P<host>[^/?:# \t\r\n]+)"
    r"(?::(?P<port>[0-9]+))?(?P<path>/[^?# \t\r\n]*)?(?:\?(?P<query>[^# \t\r\n]*))?(?:#[^ \t\r\n]*)?"
)
"""Matches a URL, which ends at a blank or at the end of the line. A closing parenthesis is therefore part of the path.
"""

_TOKEN: Final = rf"""
  (?P<skip>(?: [ \r\t;,()]+ | (?:\#[^\n]*)? \\? \n )+)
| (?P<quoted>"[^"]*" | '[^']*')
| (?P<start>start [ \r\t]* (?:program)? [ \r\t]* (?:=[ \r\t]+)? ")
| (?P<stop>stop [ \r\t]* (?:program)? [ \r\t]* (?:=[ \r\t]+)? ")
| (?P<exec>exec(?:ute)? [ \r\t]* ")
| (?P<group>group [ \t]+)
| (?P<depends>depends? [ \t]+ (?:on [ \t]*)?)
| (?P<check>check [ \t]+ (?:process[ \t]|(?P<type>device|filesystem|file|directory|host|system|fifo|status))?)
| (?P<mail>(?:from|reply-to): [ \t]* {WORD}@{WORD} | subject:[^}}\n]* | message:[^}}]*)
| (?P<url>[a-z0-9]+://[^ \t\r\n]*(?=[ \t\r\n]))
| (?P<load>loadavg[ ]* (?:\([ ]* (?P<minutes>1|5|15)[ ]*(?:m|min)?[ ]*\) | (?!{WORD})))
| (?P<share>cpu[ ]* (?:usage)*[ ]* \([ ]*
    (?: (?:us|usr|user)? | (?P<system>sy|sys|system) | (?P<wait>wa|wait))[ ]*\))
| (?P<word>{WORD} (?:@{WORD})?)
| (?P<sign>!= | .)
"""
"""Matches one token. This pattern and the following ones are compiled only on first use, so an agent without jobs
starts 4 ms sooner.
"""


_Mode: TypeAlias = tuple[tuple[str, str], ...]
"""The kinds and patterns of the matches that are possible after a certain keyword."""


def _mode(**patterns: str) -> _Mode:
    """Return the alternatives for ``_longest_match``: pairs of a kind and its pattern."""
    return tuple(patterns.items())


_NAME: Final = _mode(skip=r"[ \r\t\n]+", bare=WORD, quoted=rf"\"{WORD}\"|'{WORD}'")
"""After ``check``: a name, which is a single word even in quotes."""

_GROUP: Final = _mode(skip=r"\n", bare=WORD, quoted=rf"\"{WORD}\"|'{WORD}'")
"""After ``group``: a name as after ``check``, except that it cannot follow on an indented next line."""

_DEPENDS: Final = _mode(skip=r"[ \r\t;,()]+", line=r"[ \r\t;,()]*\n[ \r\t;,()]*", bare=WORD, over=r"[ \r\n\t]+[^,]")
"""After ``depends on``: names separated by commas. The list ends at a blank or line break without a comma."""

_ARGUMENTS: Final = _mode(skip=r"[ \r\t]+", line=r"\n", over=r"\"", quoted=r"'[^']*'", quote=r"'", bare=r"[^ \t\n\"]+")
"""Inside the quotes of a program. Quoting differs from a shell: ``'`` is special only at the start of an argument."""

_PATTERN: Final = _mode(skip=r"[ \t\r\n]+", quoted=r"\"[^\"\r\n]+\"|'[^'\r\n]+'", bare=r"[^ \t\r\n]+")
"""After ``include``: a file name pattern."""

_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")
_ESCAPE: Final = r"\\(?:([ntr \\])|0x(?!00)([0-9a-fA-F]{2}))"
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r"}

UNCLOSED: Final = "a quote that is not closed"
NO_NAME: Final = "a quote that no single word follows"


def lex(text: str) -> list[Token]:
    """Tokenize ``text``, leaving out noise words and adding a final ``END``. Invalid text becomes ``BAD`` tokens
    instead of an exception.
    """
    tokens: list[Token] = []
    at = 0
    token = re.compile(_TOKEN, re.VERBOSE | re.IGNORECASE | re.ASCII | re.DOTALL)
    while match := token.match(text, at):
        kind = match.lastgroup or ""
        at = match.end() if kind == "skip" else _HANDLERS[kind](match, tokens)
    tokens.append(Token("END", "", len(text), len(text)))
    return tokens


def unescape(text: str) -> str:
    r"""Unescape a quoted string: decode ``\n \t \r \\ "\ " \0xHH``, and keep any other backslash.

    ``\0x00`` is kept too, because monit converts it to a NUL only when it sends the text. A byte above 127 becomes the
    character that ``os.fsencode`` converts back to it.
    """
    return re.sub(_ESCAPE, _unescaped, text) if "\\" in text else text


def _unescaped(match: re.Match[str]) -> str:
    """Return the text that replaces a match of ``_ESCAPE``."""
    if match[1]:
        return _ESCAPED.get(match[1], match[1])
    return bytes.fromhex(match[2]).decode("utf-8", "surrogateescape")


def _word(match: re.Match[str], tokens: list[Token]) -> int:
    """Append the token for a keyword or an unquoted value. A noise word produces no token."""
    word = match[0]
    # All keywords are ASCII, but ``lower`` also converts the Kelvin sign to "k".
    kind = _KINDS.get(word.lower()) if word.isascii() else None
    if kind is None:
        if number := _NUMBER.fullmatch(word):
            kind = "REAL" if number[1] else "NUMBER"
        elif "@" in word:
            kind = "MAIL"
        else:
            kind = "PATH" if word[0] == "/" else "STRING"
        tokens.append(Token(kind, word, *match.span()))
    elif kind == "include":
        return _append_value(_PATTERN, "INCLUDE", match, tokens)
    elif kind:
        tokens.append(Token(kind, "", *match.span()))
    return match.end()


def _program(match: re.Match[str], tokens: list[Token]) -> int:
    """Tokenize ``start "``, ``stop "`` or ``exec "`` and the arguments up to the closing quote. If that quote is
    missing, the arguments extend to the end of the text.
    """
    text, at = match.string, match.end()
    tokens.append(Token(match.lastgroup or "", "", match.start(), at - 1))  # without the opening quote
    while at < len(text):
        start, (kind, at) = at, _longest_match(_ARGUMENTS, text, at)
        if kind == "over":
            break
        if kind == "quote":
            tokens.append(Token("BAD", UNCLOSED, start, at))
        elif kind == "quoted":
            tokens.append(Token("STRING", unescape(text[start + 1 : at - 1]), start, at))
        elif kind == "bare":
            tokens.append(Token("STRING", text[start:at], start, at))
    return at


def _named(match: re.Match[str], tokens: list[Token]) -> int:
    """Tokenize ``check [TYPE]`` or ``group``, and the name that follows. The default type is ``process``, and
    ``device`` means ``filesystem``.
    """
    kind, mode = "group", _GROUP
    if match.lastgroup == "check":
        subject = (match["type"] or "process").lower().replace("device", "filesystem")
        kind, mode = f"check {subject}", _NAME
    tokens.append(Token(kind, "", *match.span()))
    return _append_value(mode, "NAME", match, tokens)


def _append_value(mode: _Mode, wanted: str, match: re.Match[str], tokens: list[Token]) -> int:
    """Append the single value that is expected after ``match``. If there is none, the next character becomes a token,
    which the parser rejects.
    """
    text, at = match.string, match.end()
    kind = "skip"
    while kind == "skip":
        start, (kind, at) = at, _longest_match(mode, text, at)
    if kind == "bare":
        tokens.append(Token(wanted, text[start:at], start, at))
    elif kind == "quoted":
        tokens.append(Token(wanted, unescape(text[start + 1 : at - 1]), start, at))
    elif at < len(text):
        tokens.append(Token("BAD", NO_NAME, at, at + 1) if text[at] in "\"'" else Token(text[at], "", at, at + 1))
        return at + 1
    return at


def _depends(match: re.Match[str], tokens: list[Token]) -> int:
    """Tokenize ``depends on`` and the names that follow."""
    text, at = match.string, match.end()
    tokens.append(Token("depends", "", *match.span()))
    kind = "skip"
    while kind and kind != "over":
        start, (kind, at) = at, _longest_match(_DEPENDS, text, at)
        if kind == "bare":
            tokens.append(Token("NAME", text[start:at], start, at))
    return at - 1 if kind == "over" else at  # this match includes the first character after the list


def _longest_match(mode: _Mode, text: str, at: int) -> tuple[str, int]:
    """Return the kind and end of the longest match at offset ``at``, or "" and ``at`` if nothing matches. If several
    matches have the same length, the first is returned.
    """
    best = "", at
    for kind, pattern in mode:
        match = re.compile(pattern).match(text, at)
        if match and match.end() > best[1]:
            best = kind, match.end()
    return best


def _append_single_token(match: re.Match[str], tokens: list[Token]) -> int:
    """Append the token for ``match``, whose alternative in ``_TOKEN`` produces exactly one token."""
    text, value = match[0], ""
    match match.lastgroup:
        case "quoted":
            kind, value = "PATH" if text[1] == "/" and "\n" not in text else "STRING", unescape(text[1:-1])
        case "mail":  # an address is one word, a subject is the rest of the line, and a message is in braces
            kind, _, value = text.partition(":")
            kind, value = kind.upper(), value.strip(" \t\r\n")
        case "url":
            kind, value = "URL", text
        case "load":
            kind = f"loadavg{match['minutes'] or 1}"
        case "share":
            kind = "cpu system" if match["system"] else "cpu wait" if match["wait"] else "cpu user"
        case _:
            kind, value = ("BAD", UNCLOSED) if text in "\"'" else (text, "")
    tokens.append(Token(kind, value, *match.span()))
    return match.end()


_HANDLERS: Final[Mapping[str, Callable[[re.Match[str], list[Token]], int]]] = {
    **dict.fromkeys(("quoted", "mail", "url", "load", "share", "sign"), _append_single_token),
    "start": _program,
    "stop": _program,
    "exec": _program,
    "group": _named,
    "depends": _depends,
    "check": _named,
    "word": _word,
}
"""Handlers for the alternatives of ``_TOKEN``. Each appends tokens and returns the offset at which the next word
starts.
"""
