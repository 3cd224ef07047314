"""The last steps of a process before it becomes the program of a job: limits, user, capabilities, what it may open.

A program of its own, run as ``python -I -S jail.py FD``: so nothing of it happens in the daemon between fork and exec,
and nothing of it is left once the program runs, which has the same process number. ``FD`` holds the ``Order`` as JSON;
after 0 is read it becomes ``/dev/null``. What cannot be done is said on stderr; then nothing is run (exit 127).

Only the standard library: the file is run by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypedDict

FAILED: Final = 127

# include/uapi/linux/prctl.h, capability.h
_CAPBSET_READ, _CAPBSET_DROP, _KEEPCAPS, _NO_NEW_PRIVS, _AMBIENT = 23, 24, 8, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR = 2, 4
_CAPABILITY_VERSION: Final = 0x20080522

# include/uapi/linux/landlock.h; the system calls have these numbers on every architecture
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH: Final = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_ALL_OF_FIRST: Final = (1 << 13) - 1
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_SCOPE_SIGNAL: Final = 2
"""No signals to processes outside; from version 6 on. Abstract sockets belong to the network, which bpm shares."""


class Order(TypedDict):
    """What to become. ``uid`` and ``gid`` are None to stay who we are; ``capabilities`` are numbers.

    ``limits`` maps names (``RLIMIT_NOFILE``) to one value for both limits. ``read`` and ``write`` are paths that may be
    opened (all below them too), ``run`` those that may be executed as well; no ``view``: no rules. With ``may_signal``
    processes outside can be signalled all the same.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    uid: int | None
    gid: int | None
    keeps_privileges: bool
    capabilities: list[int]
    limits: dict[str, int]
    view: dict[str, list[str]] | None
    may_signal: bool


def landlock_version() -> int:
    """The version of Landlock that this kernel offers; 0 where there is none or a sandbox forbids it."""
    version: int = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return max(0, version)


def main(arguments: Sequence[str]) -> int:
    """Follow the order; returns only when that fails."""
    descriptor = int(arguments[1])
    order = _read(descriptor)
    if descriptor == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        _become(order)
        os.execve(order["argv"][0], order["argv"], order["env"])  # no shell between
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        sys.stderr.write(f"agent-shim: cannot run {order['argv'][0]}: {where}{exc.strerror}\n")
    return FAILED


def _read(descriptor: int) -> Order:
    with open(descriptor, "rb", closefd=descriptor != 0) as file:
        order: Order = json.load(file)
    return order


def _become(order: Order) -> None:
    _set_limits(order["limits"])
    _be_killable()
    if not order["keeps_privileges"]:
        _drop_bounding(order["capabilities"])
    if order["uid"] is not None and order["gid"] is not None:
        if order["capabilities"]:
            _prctl(_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(order["gid"], order["gid"], order["gid"])
        os.setresuid(order["uid"], order["uid"], order["uid"])
    if not order["keeps_privileges"]:
        _set_capabilities(order["capabilities"])
        _prctl(_NO_NEW_PRIVS, 1)
    os.chdir(order["cwd"])
    if order["view"] is not None:
        _restrict(order["view"], may_signal=order["may_signal"])


def _set_limits(limits: Mapping[str, int]) -> None:
    """One above what may be had becomes what may be had."""
    for name, value in limits.items():
        which = getattr(resource, name)
        try:
            resource.setrlimit(which, (value, value))
        except (OSError, ValueError):
            hard = resource.getrlimit(which)[1]
            resource.setrlimit(which, (hard, hard))
            sys.stderr.write(f"agent-shim: {name} is {hard}, the most that may be had, not {value}\n")


def _be_killable() -> None:
    """The agent may be spared when memory runs out; jobs are not."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < 0:
            file.write("0")


# --- capabilities ---------------------------------------------------------------------------------------------------


def _drop_bounding(kept: Iterable[int]) -> None:
    """Nothing that is run later can have more; without SETPCAP the set stays, and NO_NEW_PRIVS has to do."""
    for number in range(64):
        if number not in kept and _libc().prctl(_CAPBSET_READ, number, 0, 0, 0) == 1:
            _libc().prctl(_CAPBSET_DROP, number, 0, 0, 0)


def _set_capabilities(wanted: Sequence[int]) -> None:
    """Exactly these, kept over exec by the ambient set; what we do not have is an error."""
    mask = sum(1 << number for number in wanted)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0))
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, low, high, high, high))
    _prctl(_AMBIENT, _AMBIENT_CLEAR)
    _checked(_libc().capset(header, data), "capset")
    for number in wanted:
        _prctl(_AMBIENT, _AMBIENT_RAISE, number)


# --- Landlock -------------------------------------------------------------------------------------------------------


def _restrict(view: Mapping[str, Sequence[str]], *, may_signal: bool) -> None:
    """From here on only what is in the view can be opened. Paths that do not exist are passed over."""
    version = landlock_version()
    everything = _ALL_OF_FIRST | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    fields = struct.pack("QQQ", everything, 0, 0 if version < 6 or may_signal else _SCOPE_SIGNAL)
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = ctypes.create_string_buffer(fields[:size])
    ruleset = _checked(_libc().syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0), "Landlock")
    read = _READ_FILE | _READ_DIR
    for kind, allowed in (
        ("read", read),
        ("run", read | _EXECUTE),
        ("write", everything & ~_EXECUTE),
        ("write_run", everything),
    ):
        for path in view.get(kind, ()):
            _allow(ruleset, path, allowed)
    _checked(_libc().syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, allowed: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib would be loaded for nothing
        allowed &= _OF_FILES
    rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor))
    _checked(_libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), "Landlock", path)
    os.close(descriptor)


# --- the C library --------------------------------------------------------------------------------------------------


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *values: int) -> None:
    words = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(_libc().prctl(option, *words), f"prctl {option}")


def _checked(result: int, what: str, path: str | None = None) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path or what)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv))
