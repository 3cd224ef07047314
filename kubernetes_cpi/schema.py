"""Convert documents to types. An unknown key raises an error that suggests the most similar known key.

The property lists are generated from the types, so each field is documented in its declaration: ``Annotated[str,
doc("...")]``.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from kubernetes_cpi.errors import InputError

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN: Final = r"(?s)unknown field `(?P<key>.*?)`(?: - at `(?P<path>[^`]*)`)?$"


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A struct that rejects unknown keys."""


def doc(text: str) -> msgspec.Meta:
    """Document a field. The text appears in the property list."""
    return msgspec.Meta(description=text)


def read(document: object, wanted: type[T], *, origin: str) -> T:
    """Convert ``document`` to a struct. Errors name ``origin`` and the path within the document."""
    try:
        return msgspec.convert(document, wanted)
    except msgspec.ValidationError as exc:
        raise InputError(f"cannot use {origin}: {_with_suggestion(str(exc), wanted)}") from None


def _with_suggestion(text: str, wanted: type[msgspec.Struct]) -> str:
    """Return an error message for an unknown key that suggests the nearest known key.

    ``text`` is msgspec's message. If it is about anything else, it is returned unchanged.
    """
    found = re.search(_UNKNOWN, text)
    if not found:
        return text
    path, key = found["path"] or "$", found["key"]
    known = [field.encode_name for field in msgspec.structs.fields(_struct_at(wanted, path))]
    return f"unknown key `{key}` at `{path}`; the nearest known one is `{nearest(key, known)}`"


def nearest(key: str, known: list[str]) -> str:
    """Return the known key that is most similar to ``key``."""
    import difflib

    return max(known, key=lambda name: difflib.SequenceMatcher(None, key.lower(), name).ratio())


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two documents. Objects are merged key by key; any other value in ``above`` replaces the one in
    ``below``.
    """
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _struct_at(wanted: type[msgspec.Struct], path: str) -> type[msgspec.Struct]:
    """Return the struct at a msgspec path like ``$.ports[...]``, or ``wanted`` if there is no struct at this path."""
    here: Any = wanted
    for step in re.findall(r"\.([^.\[]+)|(\[[^\]]*\])", path):
        if step[0]:
            here = _struct_in(typing.get_type_hints(here)[step[0]])
    return here if isinstance(here, type) else wanted


def _struct_in(hint: Any) -> Any:
    """Return the struct in a type such as ``list[Port] | None``, or the type itself if there is no struct in it."""
    if isinstance(hint, type) and not get_args(hint):
        return hint
    inner = [_struct_in(argument) for argument in get_args(hint)]
    return next((one for one in inner if isinstance(one, type) and issubclass(one, msgspec.Struct)), hint)


# --- the property lists ----------------------------------------------------------------------------------------------


def rows(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Return the key, type, default and description of each field, followed by those of nested fields. Each key begins
    with ``prefix``.
    """
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint, description = hints[field.name], ""
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
            texts = (extra.description for extra in extras if isinstance(extra, msgspec.Meta))
            description = next(filter(None, texts), "")
        inner = _struct_in(hint)
        has_parts = isinstance(inner, type) and issubclass(inner, msgspec.Struct)
        yield f"{prefix}{field.encode_name}", _type_name(hint), _default(field, has_parts), description
        if has_parts:
            is_list = _type_name(hint).startswith("list")
            yield from rows(inner, f"{prefix}{field.encode_name}{'[]' if is_list else ''}.")


def _type_name(hint: Any) -> str:
    """Return a type as it is shown in the property lists."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" if value else '`""`' for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(one) for one in arguments if one is not type(None))
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"hash of {_type_name(arguments[1])}"
    names = {str: "string", int: "integer", float: "number", bool: "boolean", Any: "any", dict: "hash"}
    return names.get(hint, "hash")


def _default(field: msgspec.structs.FieldInfo, has_parts: bool) -> str:
    """Return a field's default as the property lists show it.

    The result is "" if the default is empty, or if ``has_parts`` is set because the parts have their own rows.
    """
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT and field.default_factory else field.default
    if value is None or value in ("", [], {}) or has_parts or isinstance(value, type(msgspec.NODEFAULT)):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
