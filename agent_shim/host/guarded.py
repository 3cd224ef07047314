"""The one door through which root opens, reads, lists and appends to files that a job can influence.

A job may put anything at any time into a directory that it can write: a link to a secret, a pipe without a writer, a
sparse file of terabytes, a file that grows while it is read. So at this door

* links are never followed below a directory that is given as ``root``; elsewhere only links that root made, in
  directories where only root can make them;
* only regular files are opened, and they are looked at before they are opened: a pipe is not waited for, and a device
  is not touched. ``O_NONBLOCK`` refuses a file whose owner holds a lease on it, for which the kernel would wait;
* every read, listing and walk has a bound in bytes, entries or seconds.

Everything blocks on the disk, and on a file server that does not answer perhaps for ever; :func:`aside` is the way from
the event loop: a thread for each call, a deadline, and no second call for what still hangs. All failures are
``OSError``.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import re
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from agent_shim.core.errors import HostError
from agent_shim.host import capabilities
from agent_shim.host.daemon_thread import run_in_daemon_thread

T = TypeVar("T")

DEADLINE_S: Final = 2.0
"""For what :func:`aside` does, where no other is given."""
MAX_THREADS: Final = 32
"""That may hang at the same time; beyond it everything is refused at once."""
MAX_ENTRIES: Final = 10_000
"""Of one directory that are looked at."""
MAX_SEGMENTS: Final = 10_000
"""Runs of content between the holes of a file."""
CHUNK_BYTES: Final = 64 * 1024

_MAX_LINKS: Final = 40
"""On the way to a file, as for the kernel."""

# include/uapi/linux/openat2.h; the call has the same number everywhere but on Alpha
_OPENAT2: Final = 437
_NO_MAGICLINKS: Final = 0x02
_NO_SYMLINKS: Final = 0x04
_BENEATH: Final = 0x08
_UNSURE: Final = frozenset({errno.EAGAIN, errno.EINTR, errno.EPERM, errno.ENOSYS})
"""Refusals of ``openat2`` after which the walk is asked: a rename came between, or a sandbox forbids the call."""


# --- opening --------------------------------------------------------------------------------------------------------


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Open ``path`` below the directory with descriptor ``directory``, following no link and never going up.

    ``openat2`` where the kernel has it, else step by step with the same outcome. Raises ``HostError``.
    """
    try:
        names = [name for name in path.split("/") if name not in ("", ".")]
        if path.startswith("/") or not names or ".." in names or "\0" in path:
            raise OSError(errno.EXDEV, "it does not lead below its directory")
        if has_openat2():
            try:
                return _openat2(directory, path, flags, mode)
            except OSError as exc:
                if exc.errno not in _UNSURE:
                    raise
        return _walk_beneath(directory, names, flags, mode)
    except OSError as exc:
        why = "it is a link, or one is on the way" if exc.errno == errno.ELOOP else exc.strerror or exc
        error = HostError(f"cannot open {shown(path)}: {why}")
        error.errno = exc.errno
        raise error from exc


def shown(path: str) -> str:
    """A name in a text: what is no UTF-8, ends a line or speaks to a terminal is escaped."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in path)


def _walk_beneath(directory: int, names: list[str], flags: int, mode: int) -> int:
    here = directory
    try:
        for name in names[:-1]:
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            if here != directory:
                os.close(here)
            here = below
        found = os.open(names[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=here)
        if flags & os.O_PATH and stat.S_ISLNK(os.fstat(found).st_mode) and not flags & os.O_NOFOLLOW:
            os.close(found)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return found
    finally:
        if here != directory:
            os.close(here)


def _openat2(directory: int, path: str, flags: int, mode: int) -> int:
    import ctypes

    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, _RESOLVE)
    found: int = _syscall()(
        ctypes.c_long(_OPENAT2), directory, os.fsencode(path), ctypes.c_char_p(how), ctypes.c_size_t(len(how))
    )
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


_RESOLVE: Final = _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS


@functools.cache
def has_openat2() -> bool:
    """Whether kernel and sandbox have the call."""
    top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(_openat2(top, ".", os.O_PATH, 0))
    except OSError:
        return False
    finally:
        os.close(top)
    return True


@functools.cache
def _syscall() -> Callable[..., int]:
    import ctypes  # the daemon has it already: it is a subreaper

    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


@contextmanager
def held(path: Path, root: Path | None = None) -> Iterator[int]:
    """Hold what is at ``path`` without opening it (``O_PATH``), for ``fstat`` and for paths below it.

    ``root`` is a directory above it, below which no link is followed; without it links of root are.
    """
    if root is None or path == root:
        descriptor = _walk(path)
    else:
        with held(root) as top:
            descriptor = open_beneath(top, str(path.relative_to(root)), os.O_PATH)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def start(path: Path) -> tuple[str, deque[str]]:
    """Where the way to ``path`` begins, and the names on it.

    ``/proc/self/fd/N`` is a beginning of its own: the directory that descriptor N holds. The text of that link may name
    another directory by now, one that was mounted over it, say.
    """
    held = re.match(r"/proc/self/fd/\d+(?=/|$)", str(path))
    if held is not None:
        return held[0], deque(path.parts[5:])
    return path.anchor or ".", deque(path.relative_to(path.anchor).parts)


def _walk(path: Path) -> int:
    """Open for holding, step by step."""
    top, rest = start(path)
    links = 0
    here = os.open(top, os.O_PATH | os.O_CLOEXEC)
    try:
        while rest:
            name = rest.popleft()
            below = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            try:
                if stat.S_ISLNK((status := os.fstat(below)).st_mode):
                    links += 1
                    if links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    refuse_link(name, status, os.fstat(here))
                    target = Path(os.readlink("", dir_fd=below))
                    rest.extendleft(reversed(target.relative_to(target.anchor).parts))
                    os.close(below)
                    below = os.open(target.anchor or ".", os.O_PATH | os.O_CLOEXEC, dir_fd=here)
            except BaseException:
                os.close(below)
                raise
            os.close(here)
            here = below
    except OSError as exc:
        os.close(here)
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
    except BaseException:
        os.close(here)
        raise
    return here


def refuse_link(name: str, link: os.stat_result, directory: os.stat_result) -> None:
    """Raise ``OSError`` for a link that a job may have put there: made it, or moved one of root's to this place."""
    trusted = trusted_users()
    if link.st_uid not in trusted:
        raise OSError(errno.ELOOP, f"on the way there is a link, {shown(name)}, of user {link.st_uid}")
    is_open = directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not directory.st_mode & stat.S_ISVTX
    if os.geteuid() == 0 and (directory.st_uid not in trusted or is_open):
        raise OSError(errno.ELOOP, f"on the way there is a link, {shown(name)}, in a directory that others may write")


def trusted_users() -> set[int]:
    """Whose links are followed: those of root, of this user, and of what a user namespace has no number for."""
    return {0, os.geteuid()} | ({_overflow_user()} if capabilities.is_user_namespace() else set())


@functools.cache
def _overflow_user() -> int:
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


# --- regular files --------------------------------------------------------------------------------------------------


def open_file(path: Path, root: Path | None = None) -> int:
    """Open a regular file for reading; ``root`` as for :func:`held`.

    Below ``root`` a file of root with a second name is refused: where the kernel does not protect hard links a job may
    give a name to any file.
    """
    with _named(path), held(path, root) as found:
        if root is not None:
            refuse_second_name(os.fstat(found))
        return reopen(found, os.O_RDONLY)


def refuse_second_name(found: os.stat_result) -> None:
    """Raise ``OSError`` for a file of root that has another name somewhere else; a job's own may have many."""
    if found.st_nlink > 1 and found.st_uid == 0 and stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a file of root with a second name")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Failures in the block tell the path."""
    try:
        yield
    except OSError as exc:
        if isinstance(exc, HostError):
            raise
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


def reopen(descriptor: int, flags: int) -> int:
    """Open what is held by ``descriptor``, if it is a regular file; pipes, sockets and devices are not touched."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    # The kernel's own link to what is held: no name is looked up, nothing can be exchanged.
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def status(path: Path, root: Path | None = None) -> os.stat_result:
    """What ``fstat`` says of a path; ``root`` as for :func:`held`."""
    with held(path, root) as found:
        return os.fstat(found)


def head(path: Path, limit: int, root: Path | None = None) -> bytes:
    """At most the first ``limit`` bytes of a regular file."""
    return _part(path, root, limit, from_end=False)


def tail(path: Path, limit: int, root: Path | None = None) -> bytes:
    """At most the last ``limit`` bytes of a regular file."""
    return _part(path, root, limit, from_end=True)


def _part(path: Path, root: Path | None, limit: int, *, from_end: bool) -> bytes:
    descriptor = open_file(path, root)
    try:
        begin = max(0, os.fstat(descriptor).st_size - limit) if from_end else 0
        return os.pread(descriptor, limit, begin)
    finally:
        os.close(descriptor)


def read(path: Path, limit: int, root: Path | None = None) -> bytes:
    """A whole regular file; ``OSError`` (EFBIG) for one of more than ``limit`` bytes."""
    content = head(path, limit + 1, root)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return content


def segments(descriptor: int, begin: int, end: int, limit: int = MAX_SEGMENTS) -> Iterator[tuple[int, int]]:
    """Where between ``begin`` and ``end`` there is content: first byte and end of each run, without the holes.

    A hole costs its writer nothing, and a reader of terabytes hours. After ``limit`` runs the rest counts as a hole.
    """
    at = begin
    while at < end and limit > 0:
        limit -= 1
        try:
            first = os.lseek(descriptor, at, os.SEEK_DATA)
            at = min(end, os.lseek(descriptor, first, os.SEEK_HOLE))
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # nothing but a hole follows
                return
            first, at = at, end  # a file system that does not tell
        if first < end:
            yield first, at


def chunks(descriptor: int, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The content between two places, with the place of each piece; holes are passed over."""
    for first, last in segments(descriptor, begin, end):
        at = first
        while at < last and (chunk := os.pread(descriptor, min(CHUNK_BYTES, last - at), at)):
            yield at, chunk
            at += len(chunk)


def open_log(path: Path, mode: int, root: Path | None = None) -> int:
    """Open for appending what programs print, and make it with ``mode`` if need be; ``root`` as for :func:`held`.

    Nothing is written into a file that has a second name somewhere else.
    """
    with _named(path), held(path.parent, root) as directory:
        for _ in range(3):  # removed between two steps: by a rotation once, by an attacker as often as he likes
            with suppress(FileExistsError):
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                return os.open(path.name, flags, mode, dir_fd=directory)
            with suppress(FileNotFoundError):
                return _append_to(path.name, directory)
        raise OSError(errno.EAGAIN, "it comes and goes")


def _append_to(name: str, directory: int) -> int:
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        descriptor = reopen(found, os.O_WRONLY | os.O_APPEND)
    finally:
        os.close(found)
    try:
        if os.fstat(descriptor).st_nlink > 1:
            raise OSError(errno.EINVAL, "it has a second name", name)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


# --- directories ----------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """Something below the top of a :func:`walk`; ``path`` is relative, with surrogates for what is no UTF-8."""

    path: str
    status: os.stat_result


def names(directory: int, limit: int = MAX_ENTRIES) -> list[str]:
    """At most ``limit`` names of an open directory, in the order of the file system: no sorting of millions."""
    found: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if len(found) >= limit:
                break
            found.append(entry.name)
    return found


def walk(
    top: int, below: str = "", *, depth: int, limit: int, skipped: Callable[[str], None] = lambda _: None
) -> Iterator[Entry]:
    """Regular files below the directory with descriptor ``top``, breadth first, through no link.

    ``below`` is where to begin, relative to ``top``; ``depth`` counts directories, 1 is that one alone; ``limit``
    bounds the entries that are looked at. ``skipped`` is called with the path of a directory that cannot be read, and
    of the one in which the limit was reached.
    """
    waiting = deque([(below, depth)])
    while waiting:
        here, levels = waiting.popleft()
        try:
            directory = open_directory(top, here)
        except OSError:
            skipped(here)
            continue
        try:
            for name in names(directory, limit + 1):
                if limit <= 0:
                    skipped(here)
                    return
                limit -= 1
                path = f"{here}/{name}" if here else name
                with suppress(OSError):  # gone meanwhile
                    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield Entry(path, found)
                    elif stat.S_ISDIR(found.st_mode) and levels > 1:
                        waiting.append((path, levels - 1))
        finally:
            os.close(directory)


def open_directory(top: int, below: str) -> int:
    """Open a directory for listing; "" is the one with descriptor ``top`` itself, even if that is only held."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return open_beneath(top, below, flags) if below else os.open(".", flags, dir_fd=top)


# --- from the event loop --------------------------------------------------------------------------------------------

_hanging: Final[set[str]] = set()
"""Keys of calls whose threads have not ended."""
_POLL_S: Final = 0.01
_guard: Final = threading.Lock()


async def aside(key: str, work: Callable[[], T], *, timeout: float = DEADLINE_S) -> T:
    """What ``work`` returns or raises, from a thread of its own, within ``timeout`` seconds.

    ``key`` names whose files are looked at. Calls with one key run one after another, so that what hangs keeps one
    thread. Raises ``OSError`` (ETIMEDOUT) when the time is over, whether ``work`` has begun or not.
    """

    def run() -> T:
        try:
            return work()
        finally:
            with _guard:
                _hanging.discard(key)

    try:
        async with asyncio.timeout(timeout):
            while not _begin(key):  # noqa: ASYNC110 - rare: the same files twice at once, or servers that hang
                await asyncio.sleep(_POLL_S)
            answer = run_in_daemon_thread(run, f"files of {key}")
            if answer.done():  # no thread was to be had
                with _guard:
                    _hanging.discard(key)
            return await answer
    except TimeoutError:
        raise OSError(errno.ETIMEDOUT, f"no answer within {timeout:g} s") from None


def _begin(key: str) -> bool:
    with _guard:
        is_free = key not in _hanging and len(_hanging) < MAX_THREADS
        if is_free:
            _hanging.add(key)
    return is_free
