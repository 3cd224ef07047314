"""Copies a directory with GNU tar, as the Go agent does to migrate a disk (platform/linux_platform.go,
MigratePersistentDisk).

The copy keeps owners, modes, modification times, extended attributes, ACLs, hard links, holes, symbolic links and
special files. Sockets are left out. If the target file system cannot store ACLs or attributes (NFS, FUSE drivers,
ramfs), the copy succeeds, as in the Go agent, but the result lists the lost attributes. Any other message from tar
means that content is missing, so it aborts the copy. The Go agent ignores the messages of the tar process that reads
the source.

An interrupted copy starts from the beginning again. All functions block until the copy is complete.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from agent_shim.bulk.protocol import Progress, Report, ignore
from agent_shim.core.errors import HostError
from agent_shim.host import files
from agent_shim.host.command import ENVIRONMENT
from agent_shim.host.process import SETPRIV

CHUNK_BYTES: Final = 1 << 20
REPORT_PERIOD_S: Final = 0.5
"""Interval between progress reports."""
MAX_ATTEMPTS: Final = 3
"""Maximum number of attempts to copy a source that keeps changing."""
MAX_TEXT_BYTES: Final = 16384
MIN_FREE_BYTES: Final = 1 << 20
"""If storing an attribute fails because no space is left, the disk is considered full if it has fewer free bytes than
this. Otherwise, the attribute is assumed to exceed a file system limit.
"""
SHOWN_CHARS: Final = 200
"""Number of characters shown from the beginning and from the end of a message. The middle is left out, because file
names can be long.
"""

_TAR: Final = (SETPRIV, "--pdeathsig", "KILL", "tar", "--numeric-owner")
"""The command that runs tar. If this process dies, tar is killed too, because another process may immediately begin the
next copy into the same directory.
"""
_KEPT: Final = [
    f"--xattrs-include={each}" for each in ("user.*", "trusted.*", "security.capability", "system.posix_acl_*")
]
"""Options that select the extended attributes to copy: those that are data, not the labels that a mount provides
(SELinux, NFS). The options also make tar use the POSIX format, which stores nanoseconds. ACLs are copied as attributes
because tar's ``--acls`` sets an ACL on every entry, even if there is none to copy, so tar would fail for each file if
the target does not support ACLs.
"""
_ACLS: Final = ("system.posix_acl_access", "system.posix_acl_default")
_KINDS: Final = {"system": "ACLs", "security": "file capabilities", "user": "user.* attributes"}
_UNSET: Final = re.compile(r"\w+: Cannot set '([^']*)' extended attribute for file '(.*)': ([^:'\n]+)", re.DOTALL)
"""tar's message about an attribute that could not be set. The file name is not quoted and may contain newlines."""
_UNSET_START: Final = re.compile(r"\w+: Cannot set '")
_UNLISTED: Final = re.compile(r"(.*): Warning: Cannot \w*listxattr\w*: (Argument list too long)")
_FULL: Final = os.strerror(errno.ENOSPC)
_UNSUITABLE: Final = {
    os.strerror(each)
    for each in (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.E2BIG, errno.ERANGE, errno.EINVAL, errno.ENOSPC)
}
"""Reasons why a file system can never store an attribute, so that a retry is useless. ext4 reports ENOSPC for
attributes that are too large.
"""
_CHANGED: Final = re.compile("changed as we read it|removed before we read it|shrank by")
"""tar's messages about a file that changed during the copy."""
_TOTAL: Final = re.compile("Total bytes written: ([0-9]+)")


def mirror(source: Path, target: Path, *, spared: Collection[str] = (), report: Report = ignore) -> list[str]:
    """Make ``target`` a copy of ``source``, and remove everything else from it.

    Top-level entries named in ``spared`` are neither copied nor removed. If the source changes during the copy, the
    copy is repeated, up to ``MAX_ATTEMPTS`` times in total. Returns a message for each kind of attribute that the file
    system of ``target`` could not store. If the copy fails, raises ``HostError`` with tar's first message.
    """
    what = f"copy {source} to {target}"
    with files.attempting(what):
        for _ in range(MAX_ATTEMPTS):
            _empty(target, spared)
            messages = _copy(source, target, spared, report)
            free = shutil.disk_usage(target).free
            # An attribute that does not fit is an error only on a full disk. Otherwise it exceeds a limit of the file
            # system, so it is only listed among the losses.
            if not messages.problem and messages.lacked_space and free < MIN_FREE_BYTES:
                messages.problem = f"cannot store all attributes: {_FULL}"
            if not messages.problem:
                files.sync_filesystem(target)
                return messages.losses()
            if not _CHANGED.search(messages.problem):  # another attempt would fail too
                break
    raise HostError(f"cannot {what}: {messages.problem}; {free >> 20} MiB are free")


def _empty(target: Path, spared: Collection[str]) -> None:
    """Empty a directory. If this process owns it, also set its mode to 0700 and remove its ACLs. A process that runs as
    root first takes ownership.

    Until tar restores the owner and the mode at the end, no job can replace a subdirectory with a link, which tar would
    follow. ACLs are removed because new entries would inherit the directory's default ACL, and tar does not remove
    inherited ACLs.
    """
    if os.geteuid() == 0:
        os.chown(target, 0, 0)
    if _is_ours(target):
        target.chmod(0o700)
        for name in _ACLS:
            with suppress(OSError):  # the target has no ACL, or its file system does not support ACLs
                os.removexattr(target, name)
    for path in list(target.iterdir()):
        if path.name not in spared:
            files.remove_tree(path)


def _copy(source: Path, target: Path, spared: Collection[str], report: Report) -> _Messages:
    """Make one attempt to copy everything except the top-level entries named in ``spared``, and stop at the first
    problem. Return tar's messages. A first run of tar only counts the bytes, for the progress reports.
    """
    pack = [*_TAR, *_KEPT, "-C", str(source), "--create", "--sparse", "--atime-preserve=system"]
    pack += ["--warning=no-file-ignored", "--anchored", "--no-wildcards", *(f"--exclude=./{name}" for name in spared)]
    unpack = [*_TAR, *_KEPT, "-C", str(target), "--extract", "--preserve-permissions", "--same-owner"]
    unpack += ["--delay-directory-restore", "--warning=no-timestamp"]
    # Leave out ``target`` itself if another user owns it, because this process is not allowed to change its mode and
    # owner.
    unpack += [] if _is_ours(target) else ["--no-recursion", "--anchored", "--no-wildcards", "--exclude=."]
    report(Progress("counting"))
    counted = _Messages()
    with counted.reading() as stderr:
        count = [*pack, "--file=/dev/null", "--totals", "."]
        status = subprocess.run(count, env=ENVIRONMENT, stderr=stderr, check=False).returncode
    if status:
        counted.add_problem(f"tar ended with {status}")
    if counted.problem:
        return counted
    _make_directories(source, target, spared)
    copied, reported_at = 0, 0.0
    messages = _Messages()
    with (
        messages.reading() as stderr,
        subprocess.Popen([*pack, "."], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=stderr, bufsize=0) as reader,
        subprocess.Popen(unpack, env=ENVIRONMENT, stdin=subprocess.PIPE, stderr=stderr, bufsize=0) as writer,
    ):
        assert reader.stdout
        assert writer.stdin
        with writer.stdin, suppress(BrokenPipeError):
            while not messages.problem and (data := reader.stdout.read(CHUNK_BYTES)):
                files.write_all(writer.stdin.fileno(), data)
                copied += len(data)
                if time.monotonic() - reported_at >= REPORT_PERIOD_S:
                    reported_at = time.monotonic()
                    report(Progress("copying", copied, counted.total))
        reader.stdout.close()  # so that the reader exits even if the loop was left early
        statuses = reader.wait(), writer.wait()
    if any(statuses):
        messages.add_problem(f"tar ended with {statuses}")
    return messages


def _make_directories(source: Path, target: Path, spared: Collection[str]) -> None:
    """Create all directories of ``source`` in ``target`` with full access for their owner, because tar without
    capabilities cannot fill read-only ones.
    """
    pending = [source]
    while pending:
        with os.scandir(directory := pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and not (directory == source and entry.name in spared):
                    pending.append(child := directory / entry.name)
                    (target / child.relative_to(source)).mkdir(0o700)


def _is_ours(directory: Path) -> bool:
    """Return True if this process owns the directory and may therefore change its mode.

    An agent that is not root does not own the root directory of a volume, because the kubelet changes only the group.
    """
    return directory.stat().st_uid == os.geteuid()


class _Messages:
    """tar's messages: the first problem, and the attributes that could not be copied."""

    def __init__(self) -> None:
        self.problem = ""
        self.total = 0
        """Bytes of the archive, as counted by ``--totals``."""
        self.lacked_space = False
        """True if an attribute could not be stored because no space was left."""
        self._lost: dict[tuple[str, str], tuple[int, str]] = {}
        """The number of lost attributes and the first affected file, by kind of attribute and reason."""
        self._begun = ""
        """The beginning of a message that continues on the next line because a file name contains a newline, or "" if
        there is none.
        """

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Yield the descriptor to which tar writes its messages. When the block is left, all messages have been read.

        A thread reads them while tar runs, because a million files may cause a million messages, which would fill the
        pipe.
        """
        reading, writing = os.pipe()
        thread = threading.Thread(target=self._read, args=(reading,))  # noqa: TID251 - in the worker process
        thread.start()
        try:
            yield writing
        finally:
            os.close(writing)
            thread.join()

    def losses(self) -> list[str]:
        """Return one message about lost attributes for each kind and reason."""
        return [
            f"{kind}: {count}, first of {_shortened(name)} ({why})" for (kind, why), (count, name) in self._lost.items()
        ]

    def add_problem(self, text: str) -> None:
        """Store a problem if it is the first one."""
        self.problem = self.problem or _shortened(text)

    def _read(self, pipe: int) -> None:
        """Read and interpret messages, in a thread, until every process has closed its end of the pipe."""
        with os.fdopen(pipe, encoding="utf-8", errors="replace", newline="\n") as stderr:
            while line := stderr.readline(MAX_TEXT_BYTES):
                # Only the first line of a message begins with ``tar: ``.
                self._add(line.rstrip("\n").removeprefix("" if self._begun else "tar: "))
        if self._begun:  # the last message is incomplete
            self.add_problem(self._begun)

    def _add(self, line: str) -> None:
        """Interpret the next line: the total, a lost attribute, or a problem. An attribute counts as lost only if the
        target file system cannot store it (``_UNSUITABLE``); any other reason is a problem.
        """
        text, self._begun = self._begun + line, ""
        if total := _TOTAL.match(text):
            self.total = int(total[1])
        elif unlisted := _UNLISTED.fullmatch(text):
            self._add_loss("all attributes", unlisted[1], unlisted[2])
        elif (unset := _UNSET.fullmatch(text)) and unset[3] in _UNSUITABLE:
            self._add_loss(_KINDS.get(unset[1].partition(".")[0], "trusted.* attributes"), unset[2], unset[3])
        elif unset is None and _UNSET_START.match(text) and len(text) < MAX_TEXT_BYTES:
            self._begun = f"{text}\n"
        else:
            self.add_problem(text)

    def _add_loss(self, kind: str, name: str, why: str) -> None:
        """Count a lost attribute of the file ``name``. ``losses`` reports it with ``kind`` and ``why``."""
        self.lacked_space = self.lacked_space or why == _FULL
        count, first = self._lost.get((kind, why), (0, name))
        self._lost[kind, why] = count + 1, first


def _shortened(text: str) -> str:
    """Remove the middle of a long message."""
    return text if len(text) <= 2 * SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…{text[-SHOWN_CHARS:]}"
