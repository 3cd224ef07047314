"""Finds errors in a configuration file: members with the wrong type, and unknown keys. For an unknown key, the most
similar known key is suggested. This module performs no I/O.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec


def mistakes(value: Any, wanted: Any, path: str = "$") -> Iterator[str]:
    """Yield an error message with the JSON path for each member of ``value`` that does not fit the type ``wanted``.
    (``msgspec.convert`` alone would report only the first.)

    The member names in ``value`` must already be spelled as in ``wanted`` (``wire.normalized``). If a member's type has
    a description, the message contains it instead of the type's name.
    """
    origin = typing.get_origin(wanted)
    is_union = origin in (types.UnionType, typing.Union)
    members = [each for each in typing.get_args(wanted) if each is not type(None)] if is_union else []
    if len(members) == 1 and value is not None:  # ``wanted`` is X | None
        yield from mistakes(value, members[0], path)
    elif isinstance(value, dict) and _is_struct(wanted):
        types_by_name = _member_types(wanted)
        for name, member in value.items():
            yield from mistakes(member, types_by_name[name], f"{path}.{name}")
    elif isinstance(value, dict) and origin is dict:
        for name, member in value.items():
            yield from mistakes(member, typing.get_args(wanted)[1], f"{path}.{name}")
    elif isinstance(value, list) and origin is list:
        for number, member in enumerate(value):
            yield from mistakes(member, typing.get_args(wanted)[0], f"{path}[{number}]")
    else:
        try:
            msgspec.convert(value, wanted)
        except msgspec.ValidationError as exc:
            expected = next((meta.description for meta in getattr(wanted, "__metadata__", ()) if meta.description), "")
            yield f"{f'found {value!r}, expected {expected}' if expected else exc} - at `{path}`"


def unknown_keys(value: Any, wanted: Any, path: str = "$") -> Iterator[str]:
    """Yield an error message for each key of ``value`` that is not a field of ``wanted``. The message suggests the most
    similar known key at the same level or nested under it. The keys of objects in lists are not checked.
    """
    known = {field.encode_name.lower(): field for field in msgspec.structs.fields(wanted)}
    for name, member in value.items() if isinstance(value, dict) else ():
        inner = known.get(name.lower())
        if inner is None:
            yield f"unknown key `{path}.{name}`{did_you_mean(name, all_keys(wanted), are_paths=True)}"
        elif _is_struct(inner.type):
            yield from unknown_keys(member, inner.type, f"{path}.{inner.encode_name}")


def did_you_mean(word: str, known: Iterable[str], *, are_paths: bool = False) -> str:
    """Return ``: did you mean WORD?`` with the most similar known word, or "" if no known word is similar.

    If ``are_paths`` is set, the known words are the paths of keys (see ``all_keys``). A nested key that is called
    ``word`` is suggested before any similar key. Nested keys are shown as nested JSON objects.
    """
    import difflib  # imported late, because only an unknown word needs it

    spellings = {each.lower(): each for each in known}
    nested = [each for each in spellings if are_paths and each.endswith(f".{word.lower()}")]
    similar = nested or difflib.get_close_matches(word.lower(), spellings, n=1)
    if not similar:
        return ""
    shown = spellings[similar[0]]
    *outer, name = shown.split(".") if are_paths else [shown]
    if outer:
        shown = "".join(f'{{"{key}": ' for key in outer) + f'{{"{name}": …}}' + "}" * len(outer)
    return f": did you mean {shown}?"


def all_keys(wanted: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys, including nested ones, so that for example ``monit.http`` can be suggested
    for a misplaced ``http`` at the top level.
    """
    for field in msgspec.structs.fields(wanted):
        yield f"{path}{field.encode_name}"
        if _is_struct(field.type):
            yield from all_keys(field.type, f"{path}{field.encode_name}.")


@cache  # because msgspec evaluates all annotations of a struct each time
def _member_types(wanted: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(wanted)}


def _is_struct(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, msgspec.Struct)
