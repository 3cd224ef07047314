"""Imports of libraries without dependencies and side effects that this program does not use."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def without(*absent: str, empty: Sequence[str] = ()) -> Iterator[None]:
    """Import as if some modules were not installed, and all members of others were empty classes."""
    stand_ins: dict[str, Any] = dict.fromkeys(absent) | {name: ModuleType(name) for name in empty}
    for name in empty:
        stand_ins[name].__getattr__ = lambda member: type(member, (), {})
    own = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(own)
    try:
        yield
    finally:
        for name in own:
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
