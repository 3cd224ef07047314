"""Finds the differences between two structs so that a failed comparison can report them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TypeGuard

import msgspec

MISSING = object()


def differences(left: object, right: object, place: str = "") -> Iterator[str]:
    """Yield a line ``place: left != right`` for each field, item or member that differs, at the deepest possible
    level.
    """
    if left == right:
        return
    if type(left) is type(right) and isinstance(left, msgspec.Struct):
        for field in left.__struct_fields__:
            yield from differences(getattr(left, field), getattr(right, field), f"{place}.{field}")
    elif isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in {**left, **right}:
            yield from differences(left.get(key, MISSING), right.get(key, MISSING), f"{place}[{key!r}]")
    elif _is_list(left) and _is_list(right):
        for index, (one, other) in enumerate(zip_longest(left, right, fillvalue=MISSING)):
            yield from differences(one, other, f"{place}[{index}]")
    else:
        yield f"{place.removeprefix('.') or 'value'}: {_shown(left)} != {_shown(right)}"


def has_structs(value: object) -> bool:
    """Return True for a struct and for a list, tuple or mapping that contains one."""
    if isinstance(value, Mapping):
        return any(map(has_structs, value.values()))
    return isinstance(value, msgspec.Struct) or (_is_list(value) and any(map(has_structs, value)))


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: object) -> str:
    return "nothing" if value is MISSING else repr(value)
