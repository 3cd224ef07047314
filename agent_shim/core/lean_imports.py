"""Imports libraries without loading the dependencies that only their unused features need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """A placeholder for a module that a library imports but does not need here.

    While the library is being imported, every attribute of the placeholder is an empty class. Afterwards, attributes
    are looked up in the real module, which is imported on first use.
    """

    is_importing = True

    def __getattr__(self, member: str) -> Any:
        if member.startswith("__"):  # the import system looks these up, and they must appear to be missing
            raise AttributeError(member)
        return type(member, (), {}) if self.is_importing else getattr(importlib.import_module(self.__name__), member)  # noqa: TID251 - imports only libraries


def preload(module: str, *unused: str) -> None:
    """Import ``module`` without loading the ``unused`` modules that it imports.

    If the import fails because it really uses those modules, ``module`` is left unloaded, and the caller's own import
    statement then loads it with all dependencies.
    """
    stand_ins = {name: _StandIn(name) for name in unused if name not in sys.modules}
    before = set(sys.modules)
    sys.modules.update(stand_ins)
    try:
        importlib.import_module(module)  # noqa: TID251 - imports only libraries
    except Exception:  # noqa: BLE001 - a stand-in may break an unknown version in any way
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == module.partition(".")[0]:
                del sys.modules[name]
    finally:
        for name, stand_in in stand_ins.items():
            stand_in.is_importing = False  # from now on, using the stand-in imports the real module
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
            package, _, child = name.rpartition(".")
            if package in sys.modules:
                # The import system sets this attribute of a package only for submodules that it has loaded itself.
                vars(sys.modules[package]).setdefault(child, stand_in)


@contextmanager
def without_authorities() -> Iterator[None]:
    """Prevent libraries that are imported in this block from loading the system's CAs into a default TLS context,
    because the agent does not use that context. Loading them takes 30 to 70 ms and 0.8 MB.
    """
    import ssl  # imported late, because a command without TLS does not need it

    real = ssl.create_default_context
    ssl.create_default_context = lambda *_, **__: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        yield
    finally:
        ssl.create_default_context = real
