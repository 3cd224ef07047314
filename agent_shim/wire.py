"""The envelope: bytes of a request to values, values to bytes of a reply. Pure.

Shapes and limits are the Go agent's (handler/request.go, handler/perform_handler_with_json.go); the leniency towards
nulls and the case of member names is that of Go's encoding/json, on which callers may rely.
"""

from __future__ import annotations

import types
import typing
from functools import cache
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

MAX_REPLY: Final = 1024 * 1024
"""Bytes of a reply over NATS; a longer one is cut or replaced (mbus/nats_handler.go)."""

TRUNCATED: Final = "\n...[truncated]...\n"
TOO_LONG: Final = "Response exceeded maximum allowed length"


class Request(msgspec.Struct, frozen=True):
    """What a caller asks. ``arguments`` is whatever JSON stood there: binding judges it, not decoding."""

    method: str = ""
    arguments: Any = None
    reply_to: str = ""
    protocol: int = 0


class RequestError(ValueError):
    """The bytes are not a request: over NATS it is dropped, over HTTPS answered with status 500."""


def decode_request(data: bytes) -> Request:
    """Read a request; ``null`` and missing members are their zero values, member names match in any case."""
    try:
        document = msgspec.json.decode(data)
        return convert({} if document is None else document, Request)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"cannot read the request: {exc}") from exc


def encode_value(value: Any, *, limit: int | None = None) -> bytes:
    """``{"value": …}``; if that is longer than ``limit`` bytes, the exception the Go agent sends instead."""
    reply = b'{"value":' + msgspec.json.encode(value) + b"}"
    if limit is not None and len(reply) > limit:
        return _exception(TOO_LONG)
    return reply


def encode_exception(message: str, *, limit: int | None = None) -> bytes:
    """``{"exception": {"message": …}}``; a message too long for ``limit`` bytes keeps its head and its tail."""
    reply = _exception(message)
    if limit is None or len(reply) <= limit:
        return reply
    keep = len(message)
    while len(reply) > limit:
        # Escapes make the JSON longer than the text: shrink by what was measured, and always by something.
        keep = min(keep - 1, int(keep * limit / len(reply)))
        head = keep // 2
        reply = _exception(message[:head] + TRUNCATED + message[len(message) - (keep - head) :])
    return reply


def _exception(message: str) -> bytes:
    # A lone surrogate (undecodable output of a script) has no UTF-8 form.
    clean = message.encode("utf-8", "replace").decode()
    return msgspec.json.encode({"exception": {"message": clean} if clean else {}})


def convert(value: Any, wanted: type[T] | Any) -> T:
    """JSON value to a typed one, as lenient as Go: nulls are absent, names match in any case, unknown ones are ignored.

    Raises ``msgspec.ValidationError``, whose text names the JSON path.
    """
    converted: T = msgspec.convert(_lenient(value, wanted), wanted)
    return converted


def _lenient(value: Any, wanted: Any) -> Any:
    if value is None:
        return _zero(wanted)
    origin = typing.get_origin(wanted)
    if origin in (types.UnionType, typing.Union):
        inner = [arm for arm in typing.get_args(wanted) if arm is not type(None)]
        return _lenient(value, inner[0]) if len(inner) == 1 else value
    if isinstance(value, dict):
        if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
            return _members(value, wanted)
        if origin is dict:
            arm = typing.get_args(wanted)[1]
            return {name: _lenient(member, arm) for name, member in value.items()}
    if isinstance(value, list):
        if origin in (list, frozenset, set):
            arm = typing.get_args(wanted)[0]
            return [_lenient(member, arm) for member in value]
        if origin is tuple:
            arms = typing.get_args(wanted)
            if len(arms) == 2 and arms[1] is ...:
                return [_lenient(member, arms[0]) for member in value]
            return [_lenient(member, arm) for member, arm in zip(value, arms, strict=False)] + value[len(arms) :]
    return value


def _members(value: dict[str, Any], wanted: type[msgspec.Struct]) -> dict[str, Any]:
    fields = _fields(wanted)
    members = {}
    for name, member in value.items():
        encoded, arm = fields.get(name.lower(), (None, None))
        if encoded is None or member is None:
            continue
        if encoded not in value or encoded == name:  # the exact spelling wins
            members[encoded] = _lenient(member, arm)
    return members


@cache
def _fields(wanted: type[msgspec.Struct]) -> dict[str, tuple[str, Any]]:
    return {field.encode_name.lower(): (field.encode_name, field.type) for field in msgspec.structs.fields(wanted)}


def _zero(wanted: Any) -> Any:
    """Go's zero value for a JSON ``null`` in the place of ``wanted``."""
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
