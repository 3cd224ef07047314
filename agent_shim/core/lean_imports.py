"""Imports of libraries without dependencies and side effects that this program does not use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

_COROUTINE_FUNCTION: Final = 0x80
"""``inspect.CO_COROUTINE``"""


class _Late(ModuleType):
    """Stands for a module that is imported when a member is needed that it does not have.

    ``from MODULE import MEMBER`` asks for ``__path__``, which only packages have.
    """

    def __getattr__(self, member: str) -> Any:
        if member == "__path__":
            raise AttributeError(member)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), member)


def _is_coroutine_function(function: object) -> bool:
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return bool(getattr(getattr(function, "__code__", None), "co_flags", 0) & _COROUTINE_FUNCTION)


def _unwrap(function: object) -> object:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


FEW_OF_INSPECT: Final[Mapping[str, Callable[..., Any]]] = {
    "iscoroutinefunction": _is_coroutine_function,
    "isfunction": lambda function: isinstance(function, FunctionType),
    "unwrap": _unwrap,
    "get_annotations": lambda cls: dict(vars(cls).get("__annotations__", {})),
    "signature": lambda *_, **__: "()",
}
"""Members of inspect that asyncio, nats-py and dataclasses use; a signature is for classes without a docstring."""


def as_struct(cls: type | None = None, *, frozen: bool = False) -> Any:
    """Stand for ``dataclasses.dataclass``, which takes a millisecond for a class."""
    from msgspec import Struct  # late: commands have no stand-in

    if cls is None:
        return partial(as_struct, frozen=frozen)
    members = {name: member for name, member in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    make: Any = type(Struct)
    return make(cls.__name__, (Struct,), members, frozen=frozen, dict=True, weakref=True)


@contextmanager
def without(
    *absent: str, empty: Sequence[str] = (), late: Mapping[str, Mapping[str, Callable[..., Any]]] | None = None
) -> Iterator[None]:
    """Import as if some modules were not installed, and all members of others were empty classes.

    ``late`` names modules that are imported when one of their members is needed, except the given ones.
    """
    stand_ins: dict[str, Any] = dict.fromkeys(absent) | {name: ModuleType(name) for name in empty}
    for name in empty:
        stand_ins[name].__getattr__ = lambda member: type(member, (), {})
    for name, members in (late or {}).items():
        stand_ins[name] = _Late(name)
        vars(stand_ins[name]).update(members)
    own = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(own)
    try:
        yield
    finally:
        for name, stand_in in own.items():
            if name in sys.modules and sys.modules[name] is stand_in:
                del sys.modules[name]


@contextmanager
def without_authorities() -> Iterator[None]:
    """Give contexts made at import no authorities. Reading those of a system takes 30 to 70 ms and 0.8 MB."""
    import ssl  # late: a command without TLS does without it

    real = ssl.create_default_context
    ssl.create_default_context = lambda *_, **__: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        yield
    finally:
        ssl.create_default_context = real
