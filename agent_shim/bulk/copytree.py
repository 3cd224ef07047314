"""Copy a directory with GNU tar, as the Go agent migrates a disk (platform/linux_platform.go, MigratePersistentDisk).

The copy has owners, modes, modification times, extended attributes, ACLs, hard links, holes, links and special files.
Only sockets are left out. A copy that was killed begins again. Everything here blocks for as long as the data takes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from agent_shim.bulk.protocol import Progress, Report, ignore
from agent_shim.core.errors import HostError
from agent_shim.host import files
from agent_shim.host.command import ENVIRONMENT
from agent_shim.host.descriptors import closing
from agent_shim.host.process import SETPRIV

CHUNK_BYTES: Final = 1 << 20
REPORT_PERIOD_S: Final = 0.5
"""Interval of progress reports."""
MAX_ATTEMPTS: Final = 3
"""Copies before a source that keeps changing is given up."""
MAX_TEXT_BYTES: Final = 16384
SHOWN_CHARS: Final = 200
"""Characters of a message that are shown of its beginning and of its end. Between them are long names."""

_TAR: Final = (SETPRIV, "--pdeathsig", "KILL", "tar", "--acls", "--numeric-owner")
"""Ends with this process: the next copy into the same directory may begin at once."""
_KEPT: Final = [f"--xattrs-include={each}" for each in ("user.*", "trusted.*", "security.capability")]
"""Extended attributes that are data, beside ACLs. Labels given by a mount (SELinux, NFS) are not. They imply the format
of POSIX, which has nanoseconds."""
_CHANGED: Final = re.compile("changed as we read it|removed before we read it|shrank by")
"""Messages of tar about a file that changed meanwhile."""
_TOTAL: Final = re.compile("Total bytes written: ([0-9]+)")


def mirror(source: Path, target: Path, *, spared: Collection[str] = (), report: Report = ignore) -> None:
    """Make ``target`` equal to ``source``. All else in it is removed.

    Names in ``spared`` are skipped at the top of both. Raises ``HostError`` with the first message of tar.
    """
    what = f"copy {source} to {target}"
    problem = ""
    with files.attempting(what):
        for _ in range(MAX_ATTEMPTS):
            _empty(target, spared)
            problem = _copy(source, target, spared, report)
            if not problem:
                files.sync_filesystem(target)
                return
            if not _CHANGED.search(problem):
                break
    raise HostError(f"cannot {what}: {problem}; {shutil.disk_usage(target).free >> 20} MiB are free")


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


def _copy(source: Path, target: Path, spared: Collection[str], report: Report) -> str:
    """Copy once. Return the first message of tar, or ""."""
    pack = [*_TAR, *_KEPT, "-C", str(source), "--create", "--sparse", "--atime-preserve=system"]
    pack += ["--warning=no-file-ignored", "--anchored", "--no-wildcards", *(f"--exclude=./{name}" for name in spared)]
    unpack = [*_TAR, *_KEPT, "-C", str(target), "--extract", "--preserve-permissions", "--same-owner"]
    unpack += ["--delay-directory-restore", "--warning=no-timestamp"]
    unpack += [] if _is_ours(target) else ["--no-recursion", "--anchored", "--no-wildcards", "--exclude=."]
    report(Progress("counting"))
    with _in_memory() as said:
        count = [*pack, "--file=/dev/null", "--totals", "."]
        counted = subprocess.run(count, env=ENVIRONMENT, stderr=said, check=False)
        text = _first(said)
    if not (total := _TOTAL.match(text)):
        return text or f"tar ended with {counted.returncode}"
    _make_directories(source, target, spared)
    done, reported_at = 0, 0.0
    with (
        _in_memory() as said,
        subprocess.Popen([*pack, "."], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=said, bufsize=0) as reader,
        subprocess.Popen(unpack, env=ENVIRONMENT, stdin=subprocess.PIPE, stderr=said, bufsize=0) as writer,
    ):
        assert reader.stdout
        assert writer.stdin
        with writer.stdin, suppress(BrokenPipeError):
            while not os.fstat(said).st_size and (data := reader.stdout.read(CHUNK_BYTES)):
                files.write_all(writer.stdin.fileno(), data)
                done += len(data)
                if time.monotonic() - reported_at >= REPORT_PERIOD_S:
                    reported_at = time.monotonic()
                    report(Progress("copying", done, int(total[1])))
        reader.stdout.close()
        statuses = reader.wait(), writer.wait()
        return _first(said) or (f"tar ended with {statuses}" if any(statuses) else "")


def _make_directories(source: Path, target: Path, spared: Collection[str]) -> None:
    """Make all directories, open to their owner: tar of a root without capabilities cannot fill read-only ones."""
    ahead = [source]
    while ahead:
        with os.scandir(here := ahead.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and not (here == source and entry.name in spared):
                    ahead.append(found := here / entry.name)
                    (target / found.relative_to(source)).mkdir(0o700)


def _is_ours(directory: Path) -> bool:
    """Return True if this process may change its mode: a kubelet gives a volume to a group, not to its user."""
    return directory.stat().st_uid == os.geteuid()


@contextmanager
def _in_memory() -> Iterator[int]:
    with closing(os.memfd_create("messages")) as fd:
        yield fd


def _first(said: int) -> str:
    text = os.pread(said, MAX_TEXT_BYTES, 0).decode(errors="replace").partition("\n")[0].removeprefix("tar: ")
    return text if len(text) <= 2 * SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…{text[-SHOWN_CHARS:]}"
