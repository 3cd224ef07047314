"""Codec of the envelope: bytes of a request to values, values to bytes of a reply. Pure.

Shapes and limits are the Go agent's (handler/request.go, handler/perform_handler_with_json.go). The leniency towards
nulls and the case of member names is that of Go's encoding/json, on which callers may rely.
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
"""A member unknown to the Go agent: a value of a wrong type is ignored, as Go ignores the whole member."""
Internal = Annotated[T, msgspec.Meta(extra={"internal": True})]
"""A member that documents cannot set."""
DigestText = Annotated[str, msgspec.Meta(extra={"digest": True})]
"""A digest string. Text without a digest is a wrong type. Null means the digest ``null``, for the Go agent too."""
INT64: Final = msgspec.Meta(ge=-(2**63), le=2**63 - 1)
UINT64: Final = msgspec.Meta(ge=0, extra={"most": 2**64 - 1})
"""Ranges of Go's integers. msgspec compares only with signed 64-bit numbers."""

MAX_REPLY_BYTES: Final = 1024 * 1024
"""Size of a reply over NATS. A longer one is cut or replaced (mbus/nats_handler.go)."""

TRUNCATED: Final = "\n...[truncated]...\n"
TOO_LONG: Final = "Response exceeded maximum allowed length"
TOO_DEEP: Final = "it is nested too deep"


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request. ``arguments`` is any JSON value: the binding checks it, not the decoder."""

    method: str = ""
    arguments: Any = None
    reply_to: str = ""
    protocol: Annotated[int, INT64] = 0


class RequestError(ValueError):
    """Bytes that are not a request: dropped over NATS, answered with status 500 over HTTPS."""


def decode_request(data: bytes) -> Request:
    """Read a request. ``null`` and missing members are their zero values, member names match in any case."""
    try:
        document = decode_json(data)
        return convert({} if document is None else document, Request)
    except ValueError as exc:
        raise RequestError(f"cannot read the request: {exc}") from exc


# --- JSON as Go reads it ----------------------------------------------------------------------------------------------

MAX_DEPTH: Final = 400
"""Levels of a document. A Director's have 100 at most (``max_nesting`` of Ruby's JSON)."""
_BEFORE_VALUES: Final = b"[{,"
"""A document has at least as many of these, in its texts too, as values, but for one."""

_ESCAPE: Final = r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|(?s:.))"
"""One escape of a string. A lone surrogate has the length of ``\\ud800``."""
_DECODER: Final = msgspec.json.Decoder(float_hook=float)
"""Python reads an exponent twenty times faster than msgspec, with which a megabyte of ``1e308`` takes 1.7 s."""
_MAX_INTEGER_DIGITS: Final = 100
"""Python refuses to read very long integers, and no number of the protocol is that long."""


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Read a document of one type. Raises ``msgspec.DecodeError``, also if it is nested too deep or is no UTF-8."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (RecursionError, ValueError) as exc:
        raise msgspec.DecodeError(TOO_DEEP if isinstance(exc, RecursionError) else str(exc)) from exc


def decode_json(data: bytes) -> Any:
    """Read a document that encoding/json of Go reads. Raises ``ValueError``.

    As in Go, each invalid UTF-8 byte and each lone surrogate becomes U+FFFD, and numbers may have any size.
    """
    try:
        document = _DECODER.decode(data)
    except (RecursionError, ValueError) as exc:
        problem = ValueError(TOO_DEEP if isinstance(exc, RecursionError) else str(exc))
        try:
            text = re.sub("[\udc80-\udcff]", "\ufffd", data.decode(errors="surrogateescape"))
            text = re.sub(_ESCAPE, _without_lone_surrogate, text)
            document = json.loads(text, parse_constant=_refuse, parse_int=_number)
        except (RecursionError, ValueError):
            raise problem from exc
    if sum(map(data.count, b"[{")) > MAX_DEPTH and _is_deep(document):
        raise ValueError(TOO_DEEP)
    return document


VALUE_BYTES: Final = 100
"""Memory of a small decoded value: an empty list has 64 bytes, a member of an object 200."""


def weight(data: bytes) -> int:
    """Return approximately how many bytes a request takes in memory. A megabyte of empty lists takes thirty."""
    return len(data) + VALUE_BYTES * sum(map(data.count, _BEFORE_VALUES))


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
    return "\\ufffd" if len(escape[0]) == len("\\ud800") else escape[0]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_INTEGER_DIGITS else float(digits)


def encode_value(value: Any, *, limit: int | None = None) -> bytes:
    """Return ``{"value": …}``, or the exception of the Go agent if that exceeds ``limit`` bytes."""
    reply = b'{"value":' + msgspec.json.encode(value) + b"}"
    if limit is not None and len(reply) > limit:
        return _exception(TOO_LONG)
    return reply


def encode_exception(message: str, *, limit: int | None = None) -> bytes:
    """Return ``{"exception": {"message": …}}``. A message too long for ``limit`` bytes keeps its head and its tail."""
    reply = _exception(message)
    if limit is None or len(reply) <= limit:
        return reply
    keep = len(message)
    while len(reply) > limit:
        # Escapes make the JSON longer than the text: shrink by the measured ratio, and by at least one character.
        keep = min(keep - 1, int(keep * limit / len(reply)))
        head = keep // 2
        reply = _exception(message[:head] + TRUNCATED + message[len(message) - (keep - head) :])
    return reply


def _exception(message: str) -> bytes:
    # A lone surrogate (undecodable output of a script) has no UTF-8 form.
    clean = message.encode("utf-8", "replace").decode()
    return msgspec.json.encode({"exception": {"message": clean} if clean else {}})


def convert(value: Any, wanted: type[T] | Any, ignored: list[str] | None = None) -> T:
    """Convert a JSON value as leniently as Go: null is absent, names match in any case, unknown ones are ignored.

    ``ignored`` gets a line for each ``Lenient`` member of a wrong type. Raises ``msgspec.ValidationError`` with the
    JSON path.
    """
    converted: T = msgspec.convert(normalized(value, wanted, [] if ignored is None else ignored), wanted)
    return converted


def normalized(value: Any, wanted: Any, ignored: list[str]) -> Any:
    """Return ``value`` with the names of ``wanted`` and its zero values, without unknown members; as in ``convert``."""
    if "digest" in _extra(wanted):
        # The text that Go's ``MultipleDigest.UnmarshalJSON`` parses: JSON of any type, without quotes.
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
            return [*(normalized(member, arm, ignored) for member, arm in pairs), *value[len(arms) :]]
    return value


def _members(value: dict[str, Any], wanted: type[msgspec.Struct], ignored: list[str]) -> dict[str, Any]:
    """Return the members of ``value`` under their names in ``wanted``. The last of two spellings counts."""
    fields = _fields(wanted)
    members = {}
    for name, member in value.items():
        encoded, arm = fields.get(name.lower(), (None, None))
        if encoded is None or (member is None and "digest" not in _extra(arm)):
            continue
        taken = normalized(member, arm, ignored)
        if "lenient" in _extra(arm):
            try:
                msgspec.convert(taken, arm)
            except msgspec.ValidationError as exc:
                ignored.append(f"{name}: {exc}")
                continue
        members[encoded] = taken
    return members


@cache
def _fields(wanted: type[msgspec.Struct]) -> dict[str, tuple[str, Any]]:
    return {
        field.encode_name.lower(): (field.encode_name, field.type)
        for field in msgspec.structs.fields(wanted)
        if "internal" not in _extra(field.type)
    }


def _extra(wanted: Any) -> dict[str, Any]:
    """Return the annotations that ``Lenient``, ``Internal`` and similar types attach to a type."""
    noted: dict[str, Any] = {}
    for meta in getattr(wanted, "__metadata__", ()):
        noted |= getattr(meta, "extra", None) or {}
    return noted


def _zero(wanted: Any) -> Any:
    """Return Go's zero value for a JSON ``null`` of type ``wanted``."""
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
