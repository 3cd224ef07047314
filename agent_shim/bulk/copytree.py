"""Copy a directory with GNU tar, as the Go agent migrates a disk (platform/linux_platform.go, MigratePersistentDisk).

The copy has owners, modes, modification times, extended attributes, ACLs, hard links, holes, links and special files.
Sockets are left out. The Go agent copies neither ACLs nor extended attributes, so a target that cannot hold them (NFS,
SMB, most FUSE drivers) does not end the copy, but the caller learns what was lost. Any other message of tar does end
it: the Go agent would go on without files that tar could not read.

A copy that was killed begins again. Everything here blocks for as long as the data takes.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent_shim.bulk.protocol import Progress, Report, ignore
from agent_shim.core.errors import HostError
from agent_shim.host import files
from agent_shim.host.command import ENVIRONMENT
from agent_shim.host.descriptors import closing
from agent_shim.host.process import SETPRIV

CHUNK_BYTES: Final = 1 << 20
_MAX_ID: Final = (1 << 32) - 1
REPORT_PERIOD_S: Final = 0.5
"""Interval of progress reports."""
MAX_ATTEMPTS: Final = 3
"""Copies before a source that keeps changing is given up."""
MAX_TEXT_BYTES: Final = 16384
"""Read of the messages at a time."""
SHOWN_CHARS: Final = 200
"""Characters of a message that are shown of its beginning and of its end. Between them are long names."""

_TAR: Final = (SETPRIV, "--pdeathsig", "KILL", "tar", "--numeric-owner")
"""Ends with this process: the next copy into the same directory may begin at once."""
_KEPT: Final = [f"--xattrs-include={each}" for each in ("user.*", "trusted.*", "security.capability")]
"""Extended attributes that are data, beside ACLs. Labels given by a mount (SELinux, NFS) are not. They imply the format
of POSIX, which has nanoseconds."""
_CHANGED: Final = re.compile("changed as we read it|removed before we read it|shrank by")
"""Messages of tar about a file that changed meanwhile."""
_TOTAL: Final = re.compile("Total bytes written: ([0-9]+)")
_NOT_KEPT: Final = re.compile(
    r"(?:\w*setxattr\w*|acl_\w+): Cannot (?:set|drop) .*: (?:Operation not supported|Operation not permitted"
    "|Argument list too long|Numerical result out of range|No space left on device)"
)
"""Messages of tar about an attribute or an ACL that the target cannot hold. tar itself takes them for warnings."""
_NOTHING_TO_KEEP: Final = re.compile(r".*: Warning: Cannot \w*(?:xattr|acl_get)\w*: Operation not supported")
"""Messages of tar about a source without attributes or ACLs."""
_ACLS: Final = frozenset({"system.posix_acl_access", "system.posix_acl_default"})
_ACL_OF_0700: Final = struct.pack("<I" + 3 * "HHI", 2, 1, 7, _MAX_ID, 4, 0, _MAX_ID, 32, 0, _MAX_ID)
"""An ACL that says no more than the mode 0700, as the kernel encodes it (include/uapi/linux/posix_acl_xattr.h)."""


class _Messages:
    """Sorts the messages of the tars that write to ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._position, self._rest = descriptor, 0, b""
        self.total = 0
        """Bytes of the archive, once tar has counted them."""
        self.problem = ""
        """The first message that ends the copy."""
        self.lost: list[str] = []
        """Messages about attributes and ACLs that the target cannot hold."""

    def read(self, *, is_last: bool = False) -> str:
        """Sort the new messages. Return the first one that ends the copy, or ""."""
        while data := os.pread(self._descriptor, MAX_TEXT_BYTES, self._position):
            self._position += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._sort(lines)
        if is_last and self._rest:
            self._sort([self._rest])
        return self.problem

    def _sort(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").removeprefix("tar: ")
            if total := _TOTAL.match(text):
                self.total = int(total[1])
            elif _NOT_KEPT.match(text):
                self.lost.append(_shortened(text))
            elif not _NOTHING_TO_KEEP.fullmatch(text):
                self.problem = self.problem or _shortened(text)


def mirror(source: Path, target: Path, *, spared: Collection[str] = (), report: Report = ignore) -> str:
    """Make ``target`` equal to ``source``. All else in it is removed.

    Names in ``spared`` are skipped at the top of both. Returns a sentence about attributes and ACLs that the target
    cannot hold, or "". Raises ``HostError`` with the first other message of tar.
    """
    what = f"copy {source} to {target}"
    with files.attempting(what):
        for _ in range(MAX_ATTEMPTS):
            _empty(target, spared)
            with closing(os.memfd_create("messages")) as descriptor:
                said = _Messages(descriptor)
                _copy(source, target, spared, report, said, descriptor)
            if not said.problem:
                files.sync_filesystem(target)
                return f"{target} cannot hold {len(said.lost)} attributes or ACLs: {said.lost[0]}" if said.lost else ""
            if not _CHANGED.search(said.problem):
                break
    raise HostError(f"cannot {what}: {said.problem}; {shutil.disk_usage(target).free >> 20} MiB are free")


def _empty(target: Path, spared: Collection[str]) -> None:
    """Remove the content of a directory, and close it to jobs: tar opens it at its end.

    Tar follows a link that a job puts in the place of a directory that tar has made.
    """
    if os.geteuid() == 0:
        os.chown(target, 0, 0)
    if _is_ours(target):
        target.chmod(0o700)
    for path in list(target.iterdir()):
        if path.name not in spared:
            files.remove_tree(path)


def _copy(
    source: Path, target: Path, spared: Collection[str], report: Report, said: _Messages, descriptor: int
) -> None:
    """Copy once. ``said`` has the messages afterwards, which the tars write to ``descriptor``."""
    # Given --acls, tar sets an ACL on every entry, which is a message for each where the target has none.
    has_acls = _holds_acls(target)
    tar = [*_TAR, *_KEPT, *(["--acls"] if has_acls else [])]
    pack = [*tar, "-C", str(source), "--create", "--sparse", "--atime-preserve=system"]
    pack += ["--warning=no-file-ignored", "--anchored", "--no-wildcards", *(f"--exclude=./{name}" for name in spared)]
    unpack = [*tar, "-C", str(target), "--extract", "--preserve-permissions", "--same-owner"]
    unpack += ["--delay-directory-restore", "--warning=no-timestamp"]
    unpack += [] if _is_ours(target) else ["--no-recursion", "--anchored", "--no-wildcards", "--exclude=."]
    report(Progress("counting"))
    count = [*pack, "--file=/dev/null", "--totals", "."]
    counted = subprocess.run(count, env=ENVIRONMENT, stderr=descriptor, check=False)
    if said.read() or not said.total:
        said.problem = said.problem or f"tar ended with {counted.returncode}"
        return
    _prepare(source, target, spared, None if has_acls else said.lost)
    done, reported_at = 0, 0.0
    with (
        subprocess.Popen([*pack, "."], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=descriptor, bufsize=0) as reader,
        subprocess.Popen(unpack, env=ENVIRONMENT, stdin=subprocess.PIPE, stderr=descriptor, bufsize=0) as writer,
    ):
        assert reader.stdout
        assert writer.stdin
        with writer.stdin, suppress(BrokenPipeError):
            while not said.read() and (data := reader.stdout.read(CHUNK_BYTES)):
                files.write_all(writer.stdin.fileno(), data)
                done += len(data)
                if time.monotonic() - reported_at >= REPORT_PERIOD_S:
                    reported_at = time.monotonic()
                    report(Progress("copying", done, said.total))
        reader.stdout.close()
        statuses = reader.wait(), writer.wait()
    if not said.read(is_last=True) and any(statuses):
        said.problem = f"tar ended with {statuses}"


def _prepare(source: Path, target: Path, spared: Collection[str], lost: list[str] | None) -> None:
    """Make all directories, open to their owner: tar of a root without capabilities cannot fill read-only ones.

    Adds the entries that have an ACL to ``lost``, if given.
    """
    ahead = [source]
    while ahead:
        with os.scandir(here := ahead.pop()) as entries:
            for entry in entries:
                if here == source and entry.name in spared:
                    continue
                found = here / entry.name
                if (
                    lost is not None
                    and not entry.is_symlink()
                    and _ACLS & set(os.listxattr(found, follow_symlinks=False))
                ):
                    lost.append(f"ACL of {_shortened(repr(str(found)))}: Operation not supported")
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(found)
                    (target / found.relative_to(source)).mkdir(0o700)


def _holds_acls(directory: Path) -> bool:
    """Return True unless the file system has no ACLs. Found by trial."""
    with tempfile.TemporaryDirectory(prefix=".agent_shim-", dir=directory) as scratch:
        try:
            os.setxattr(scratch, "system.posix_acl_access", _ACL_OF_0700)
        except OSError as exc:
            return exc.errno != errno.EOPNOTSUPP
    return True


def _is_ours(directory: Path) -> bool:
    """Return True if this process may change its mode: a kubelet gives a volume to a group, not to its user."""
    return directory.stat().st_uid == os.geteuid()


def _shortened(text: str) -> str:
    return text if len(text) <= 2 * SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…{text[-SHOWN_CHARS:]}"
