"""Decodes requests from bytes and encodes replies to bytes. This module performs no I/O.

Formats and limits match the Go agent (handler/request.go, handler/perform_handler_with_json.go). Null values and the
case of member names are treated as leniently as by Go's encoding/json, because callers may rely on that.
"""

from __future__ import annotations

import json
import re
import types
import typing
from functools import cache
from itertools import chain
from typing import Annotated, Any, Final, NoReturn, TypeVar

import msgspec

from agent_shim.core.digest import MultipleDigest
from agent_shim.core.errors import DigestError

T = TypeVar("T")

Lenient = Annotated[T, msgspec.Meta(extra={"lenient": True})]
"""A member that the Go agent ignores, so a value of the wrong type must not be an error."""
Internal = Annotated[T, msgspec.Meta(extra={"internal": True})]
"""A member that only the agent itself sets. In a document, it is ignored."""
DigestText = Annotated[str, msgspec.Meta(extra={"digest": True})]
"""A digest string. An invalid digest is treated as a value of the wrong type. As in the Go agent, a JSON null is read
as the digest string ``null``.
"""
INT64: Final = msgspec.Meta(ge=-(2**63), le=2**63 - 1)
UINT64: Final = msgspec.Meta(ge=0, extra={"most": 2**64 - 1})
"""The range of Go's uint64. The maximum is in ``extra`` because msgspec's own limits are signed 64-bit numbers."""

MAX_REPLY_BYTES: Final = 1024 * 1024
"""Maximum size of a reply over NATS. A longer reply is truncated or replaced (mbus/nats_handler.go)."""

TRUNCATED: Final = "\n...[truncated]...\n"
TOO_LONG: Final = "Response exceeded maximum allowed length"
TOO_DEEP: Final = "it is nested too deep"


class Request(msgspec.Struct, frozen=True):
    """A request. ``arguments`` may be any JSON value, because it is checked only when it is bound to an action."""

    method: str = ""
    arguments: Any = None
    reply_to: str = ""
    protocol: Annotated[int, INT64] = 0


class RequestError(ValueError):
    """The received bytes are not a valid request. Over NATS they are dropped, and over HTTPS they are answered with
    status 500.
    """


def decode_request(data: bytes) -> Request:
    """Read a request. ``null`` and missing members become zero values, and member names are not case-sensitive."""
    try:
        document = decode_json(data)
        return convert({} if document is None else document, Request)
    except ValueError as exc:
        raise RequestError(f"cannot read the request: {exc}") from exc


# --- JSON as Go reads it ----------------------------------------------------------------------------------------------

MAX_DEPTH: Final = 400
"""Maximum nesting depth of a document. A Director sends documents of at most 100 levels (``max_nesting`` in Ruby's
JSON).
"""
_ESCAPE: Final = r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|(?s:.))"
"""Matches one escape in a string. A match as long as ``\\ud800`` is a lone surrogate, because a pair is twice as long
and other escapes are matched only up to their second character.
"""
_DECODER: Final = msgspec.json.Decoder(float_hook=float)
"""A decoder that lets Python parse floats, because Python reads exponents twenty times faster than msgspec, which needs
1.7 s for a megabyte of ``1e308``.
"""
_MAX_INTEGER_DIGITS: Final = 100
"""Integers with more digits than this are read as floats, because Python refuses to convert very long integers."""


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode a JSON document to the type ``kind``, without Go's leniency (see ``convert``). Raises
    ``msgspec.DecodeError`` for every kind of invalid document, including one that is nested too deeply or not UTF-8.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (RecursionError, ValueError) as exc:
        raise msgspec.DecodeError(TOO_DEEP if isinstance(exc, RecursionError) else str(exc)) from exc


def decode_json(data: bytes) -> Any:
    """Decode any document that Go's encoding/json accepts. Raises ``ValueError``.

    As in Go, each invalid UTF-8 byte and each lone surrogate becomes U+FFFD, and numbers may have any size.
    """
    try:
        document = _DECODER.decode(data)
    except (RecursionError, ValueError) as exc:
        # Replace invalid UTF-8 and lone surrogates, and retry with Python's decoder, which is slower but accepts more.
        problem = ValueError(TOO_DEEP if isinstance(exc, RecursionError) else str(exc))
        try:
            text = re.sub("[\udc80-\udcff]", "\ufffd", data.decode(errors="surrogateescape"))
            text = re.sub(_ESCAPE, _without_lone_surrogate, text)
            document = json.loads(text, parse_constant=_refuse, parse_int=_number)
        except (RecursionError, ValueError):
            raise problem from exc
    # Count the brackets first, which is fast. Most documents have too few of them to be nested that deeply.
    if sum(map(data.count, b"[{")) > MAX_DEPTH and _is_deep(document):
        raise ValueError(TOO_DEEP)
    return document


def _is_deep(document: Any) -> bool:
    """Return True if values are nested deeper than ``MAX_DEPTH``."""
    values = [document]
    for _ in range(MAX_DEPTH + 1):
        if not values:
            return False
        inner = [each.values() if isinstance(each, dict) else each for each in values if isinstance(each, dict | list)]
        values = list(chain.from_iterable(inner))
    return True


def _without_lone_surrogate(escape: re.Match[str]) -> str:
    """Return U+FFFD as an escape for a lone surrogate, and any other match of ``_ESCAPE`` unchanged."""
    return "\\ufffd" if len(escape[0]) == len("\\ud800") else escape[0]


def _refuse(constant: str) -> NoReturn:
    """Reject ``NaN`` and ``Infinity``, which Python's decoder accepts."""
    raise ValueError(f"{constant} is not JSON")


def _number(digits: str) -> int | float:
    """Parse an integer literal for Python's decoder."""
    return int(digits) if len(digits) <= _MAX_INTEGER_DIGITS else float(digits)


def encode_value(value: Any, *, limit: int | None = None) -> bytes:
    """Return ``{"value": …}`` or, if that is longer than ``limit`` bytes, the exception that the Go agent returns for a
    reply that is too long. If ``limit`` is None, any length is allowed.
    """
    reply = b'{"value":' + msgspec.json.encode(value) + b"}"
    if limit is not None and len(reply) > limit:
        return _exception(TOO_LONG)
    return reply


def encode_exception(message: str, *, limit: int | None = None) -> bytes:
    """Return ``{"exception": {"message": …}}``. If the message is too long for ``limit`` bytes, its beginning and end
    are kept.
    """
    reply = _exception(message)
    if limit is None or len(reply) <= limit:
        return reply
    keep = len(message)
    while len(reply) > limit:
        # Escapes make the JSON longer than the text, so shrink the text by the measured ratio, and by at least one
        # character.
        keep = min(keep - 1, int(keep * limit / len(reply)))
        head = keep // 2
        reply = _exception(message[:head] + TRUNCATED + message[len(message) - (keep - head) :])
    return reply


def _exception(message: str) -> bytes:
    # A lone surrogate (from undecodable script output) has no UTF-8 form.
    clean = message.encode("utf-8", "replace").decode()
    # As in Go, an empty message is omitted.
    return msgspec.json.encode({"exception": {"message": clean} if clean else {}})


def convert(value: Any, wanted: type[T] | Any, ignored: list[str] | None = None) -> T:
    """Convert a JSON value as leniently as Go does: null counts as absent, member names are not case-sensitive, and
    unknown members are ignored.

    For each ``Lenient`` member of the wrong type, a line is appended to ``ignored``. Raises ``msgspec.ValidationError``
    with the JSON path.
    """
    converted: T = msgspec.convert(normalized(value, wanted, [] if ignored is None else ignored), wanted)
    return converted


def normalized(value: Any, wanted: Any, ignored: list[str]) -> Any:
    """Prepare ``value`` for conversion to ``wanted``: spell member names as in ``wanted``, drop unknown members and
    those that are null, and replace any other null with a zero value. For ``ignored``, see ``convert``. Raises
    ``msgspec.ValidationError`` for an invalid digest or a ``UINT64`` that is too large.
    """
    if "digest" in _extra(wanted):
        # Go's ``MultipleDigest.UnmarshalJSON`` parses the JSON text of any value, without the quotes.
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        try:
            MultipleDigest.parse(text)
        except DigestError as exc:
            raise msgspec.ValidationError(str(exc)) from exc
        return text
    if value is None:
        return _zero(wanted)
    if isinstance(value, int) and value > _extra(wanted).get("most", value):
        raise msgspec.ValidationError(f"{value} does not fit into 64 bits")
    origin = typing.get_origin(wanted)
    if origin in (types.UnionType, typing.Union):
        inner = [arm for arm in typing.get_args(wanted) if arm is not type(None)]
        return normalized(value, inner[0], ignored) if len(inner) == 1 else value
    if isinstance(value, dict):
        if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
            return _members(value, wanted, ignored)
        if origin is dict:
            arm = typing.get_args(wanted)[1]
            return {name: normalized(member, arm, ignored) for name, member in value.items()}
    if isinstance(value, list):
        arms = typing.get_args(wanted)
        if origin in (list, frozenset, set) or (origin is tuple and arms[1:] == (...,)):
            return [normalized(member, arms[0], ignored) for member in value]
        if origin is tuple:
            pairs = zip(value, arms, strict=False)
            # Keep excess elements, so that the conversion reports them as an error.
            return [*(normalized(member, arm, ignored) for member, arm in pairs), *value[len(arms) :]]
    return value


def _members(value: dict[str, Any], wanted: type[msgspec.Struct], ignored: list[str]) -> dict[str, Any]:
    """Return the members of ``value`` under their names in ``wanted``. If a name occurs in two spellings, the last
    occurrence counts. Unknown members, null (except for a digest) and ``Lenient`` members of the wrong type are left
    out, so that the conversion uses the default.
    """
    fields = _fields(wanted)
    members = {}
    for name, member in value.items():
        encoded, member_type = fields.get(name.lower(), (None, None))
        if encoded is None or (member is None and "digest" not in _extra(member_type)):
            continue
        prepared = normalized(member, member_type, ignored)
        if "lenient" in _extra(member_type):
            try:
                msgspec.convert(prepared, member_type)
            except msgspec.ValidationError as exc:
                ignored.append(f"{name}: {exc}")
                continue
        members[encoded] = prepared
    return members


@cache
def _fields(wanted: type[msgspec.Struct]) -> dict[str, tuple[str, Any]]:
    """Return the name and type of each field that a document can set, keyed by the name in lower case."""
    return {
        field.encode_name.lower(): (field.encode_name, field.type)
        for field in msgspec.structs.fields(wanted)
        if "internal" not in _extra(field.type)
    }


def _extra(wanted: Any) -> dict[str, Any]:
    """Return the annotations that ``Lenient``, ``Internal`` and similar types attach to a type."""
    extra: dict[str, Any] = {}
    for meta in getattr(wanted, "__metadata__", ()):
        extra |= getattr(meta, "extra", None) or {}
    return extra


def _zero(wanted: Any) -> Any:
    """Return the zero value of the type ``wanted``, which replaces a JSON ``null`` as in Go."""
    if typing.get_origin(wanted) is typing.Annotated:
        return _zero(typing.get_args(wanted)[0])
    origin = typing.get_origin(wanted) or wanted
    if origin in (types.UnionType, typing.Union, Any):
        return None
    if isinstance(origin, type):
        if issubclass(origin, msgspec.Struct):
            return {}
        if origin in (list, tuple, set, frozenset):
            return []
        if origin in (str, int, float, bool, dict):
            return origin()
    return None
