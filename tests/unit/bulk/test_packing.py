"""Tests packing: archives are reproducible, and files that are hostile or change during packing do no harm."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import signal
import socket
import subprocess
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from agent_shim.bulk import packing
from agent_shim.bulk.protocol import Tree
from agent_shim.core.errors import HostError
from agent_shim.host import guarded
from tests.support.users import as_ordinary_user


def packed(*trees: Tree, compressed: bool = True, remarks: str = "") -> bytes:
    out = io.BytesIO()
    packing.pack(out, trees, compressed=compressed, remarks=remarks)
    return out.getvalue()


def logs(root: Path, *patterns: str) -> bytes:
    """Pack ``root`` as if it were a job's log directory, in which files may change during packing."""
    return packed(Tree(str(root), patterns=list(patterns or ["**/*"])), remarks="remarks")


def before_reading(monkeypatch: pytest.MonkeyPatch, name: str, happen: Callable[[], object]) -> None:
    """Call ``happen`` once, just before the directory entry ``name`` is opened."""
    honest = guarded.hold
    left = [happen]

    def hold(directory: int, opened: str) -> int:
        if opened == name and left:
            left.pop()()
        return honest(directory, opened)

    monkeypatch.setattr(guarded, "hold", hold)


def after_seeing_the_size(monkeypatch: pytest.MonkeyPatch, size: int, happen: Callable[[], object]) -> None:
    """Call ``happen`` once, just after ``fstat`` has reported a file of ``size`` bytes."""
    honest = os.fstat
    left = [happen]

    def fstat(fd: int) -> os.stat_result:
        status = honest(fd)
        if status.st_size == size and left:
            left.pop()()
        return status

    monkeypatch.setattr(os, "fstat", fstat)


def entries(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {member.name: member for member in tar}


def content(data: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = tar.extractfile(name)
        assert found is not None
        return found.read()


def make(root: Path, names: Iterable[str]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a tree that resembles a compiled package and contains every kind of entry."""
    tree = tmp_path / "tree"
    make(tree, ["bin/run", "lib/b", "lib/a", "long/" + "n" * 120])
    (tree / "bin" / "run").chmod(0o755)
    (tree / "empty").mkdir(mode=0o700)
    (tree / "link").symlink_to("/var/vcap/packages/other")
    (tree / "to-dir").symlink_to("lib")
    (tree / "twin").hardlink_to(tree / "lib" / "a")
    (tree / "big").write_bytes(os.urandom(packing.PIECE_BYTES + 30_001))
    for path in tree.rglob("*"):
        os.utime(path, (1_600_000_000, 1_600_000_000), follow_symlinks=False)
    os.utime(tree, (1_600_000_000, 1_600_000_000))
    return tree


@pytest.mark.parametrize("compressed", [True, False])
def test_gnu_tar_unpacks_a_packed_tree_unchanged(tmp_path: Path, tree: Path, compressed: bool) -> None:
    (tmp_path / "a.tgz").write_bytes(packed(Tree(str(tree)), compressed=compressed))
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "a.tgz", "-C", tmp_path / "out"], check=True)
    listed = subprocess.run(["tar", "-tf", tmp_path / "a.tgz"], check=True, capture_output=True, text=True).stdout

    assert subprocess.run(["diff", "-r", "--no-dereference", tree, tmp_path / "out"]).returncode == 0
    assert all(name.startswith("./") for name in listed.split())
    assert [(p.lstat().st_mode, p.lstat().st_mtime, p.lstat().st_nlink) for p in sorted(tree.rglob("*"))] == [
        (p.lstat().st_mode, p.lstat().st_mtime, p.lstat().st_nlink) for p in sorted((tmp_path / "out").rglob("*"))
    ]


def test_packing_the_same_tree_gives_the_same_bytes(tmp_path: Path, tree: Path) -> None:
    first = packed(Tree(str(tree)))
    copy = tmp_path / "copy"
    copy.mkdir()
    subprocess.run(["cp", "-a", "--reflink=never", *sorted(tree.iterdir(), reverse=True), copy], check=True)
    os.utime(copy, (1_600_000_000, 1_600_000_000))
    if os.geteuid() == 0:
        for path in copy.rglob("*"):
            os.chown(path, 12, 34, follow_symlinks=False)

    assert packed(Tree(str(copy))) == first


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a directory with a log so large that it is packed in many chunks."""
    large = tmp_path / "large"
    large.mkdir()
    lines = (f"{number} {hashlib.sha512(b'%d' % number).hexdigest()}\n" for number in range(10_000))
    (large / "a.log").write_text("".join(lines))
    monkeypatch.setattr(packing, "PIECE_BYTES", 64 * 1024)
    assert (large / "a.log").stat().st_size > 10 * packing.PIECE_BYTES
    return large


@pytest.mark.parametrize("processors", [1, 2])
def test_archive_is_independent_of_the_number_of_processors(
    tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    wanted = logs(large)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    data = logs(large)
    (tmp_path / "a.tgz").write_bytes(data)
    inflater = zlib.decompressobj(31)

    assert inflater.decompress(data)[512:].startswith((large / "a.log").read_bytes())
    assert data == wanted
    assert (inflater.eof, inflater.unused_data) == (True, b"")
    assert subprocess.run(["gzip", "-t", tmp_path / "a.tgz"]).returncode == 0


def test_full_disk_stops_packing(large: Path) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any, /) -> int:
            if self.tell() > 1000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    before = threading.active_count()

    with pytest.raises(packing.OutputError, match="No space left on device"):
        packing.pack(Full(), [Tree(str(large), patterns=["**/*"])], remarks="remarks")
    assert threading.active_count() == before


@pytest.mark.parametrize("compressed", [True, False])
def test_packing_returns_the_digests_of_the_archive(large: Path, compressed: bool) -> None:
    out = io.BytesIO()

    digests = packing.pack(out, [Tree(str(large))], compressed=compressed).digests

    data = out.getvalue()
    assert [(each.algorithm, each.value) for each in digests] == [
        ("sha1", hashlib.sha1(data, usedforsecurity=False).hexdigest()),
        ("sha512", hashlib.sha512(data).hexdigest()),
    ]


def test_packing_follows_no_symlinks(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "logs" / "job").mkdir(parents=True)
    (tmp_path / "logs" / "job" / "planted.log").symlink_to(tmp_path / "secret")
    (tmp_path / "logs" / "dir").symlink_to(tmp_path)
    data = packed(Tree(str(tmp_path / "logs"), patterns=["**/*"]))

    assert {name: (member.issym(), member.linkname) for name, member in entries(data).items()} == {
        "./dir": (True, str(tmp_path)),
        "./job/planted.log": (True, str(tmp_path / "secret")),
    }


@pytest.mark.root
def test_hard_links_to_root_owned_files_are_not_packed(tmp_path: Path) -> None:
    """In its log directory, a job can create a hard link to one of root's files."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.log").hardlink_to(tmp_path / "secret")
    data = logs(tmp_path / "logs")

    assert list(entries(data)) == ["./remarks"]
    assert content(data, "./remarks") == b"./a.log: it is a file of root with a second hard link, and not packed\n"
    assert content(packed(Tree(str(tmp_path / "logs"))), "./a.log") == b"secret"


def test_packed_packages_belong_to_root_and_packed_logs_have_no_owner_name(tmp_path: Path) -> None:
    make(tmp_path, ["a"])
    (tmp_path / "out").symlink_to("/")

    fixed, live = entries(packed(Tree(str(tmp_path)))), entries(logs(tmp_path))

    assert {(member.uname, member.gname) for member in fixed.values()} == {("root", "root")}
    assert {name: member.uname for name, member in live.items()} == {"./a": "", "./remarks": "root"}


@pytest.mark.parametrize("what", ["link", "fifo", "directory", "nothing"])
def test_file_replaced_with_a_different_type_of_file_during_packing_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    make(tmp_path, ["logs/a", "logs/b", "secret"])

    def swap() -> None:
        (tmp_path / "logs" / "a").unlink()
        if what == "link":
            (tmp_path / "logs" / "a").symlink_to(tmp_path / "secret")
        elif what == "fifo":
            os.mkfifo(tmp_path / "logs" / "a")
        elif what == "directory":
            (tmp_path / "logs" / "a").mkdir()

    before_reading(monkeypatch, "a", swap)

    assert list(entries(packed(Tree(str(tmp_path / "logs"), patterns=["*"])))) == ["./b"]


def test_directory_replaced_with_a_symlink_during_packing_is_packed_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory stays open until its files are packed, so a symlink in its place is never followed."""
    make(tmp_path, ["logs/job/a", "logs/job/b", "secret/a", "secret/b"])

    def swap() -> None:
        (tmp_path / "logs" / "job").rename(tmp_path / "logs" / "moved")
        (tmp_path / "logs" / "job").symlink_to(tmp_path / "secret")

    before_reading(monkeypatch, "b", swap)
    data = packed(Tree(str(tmp_path / "logs"), patterns=["**/*"]))

    assert {name: content(data, name) for name in entries(data)} == {"./job/a": b"logs/job/a", "./job/b": b"logs/job/b"}


def test_fifos_and_sockets_are_not_packed(tmp_path: Path) -> None:
    make(tmp_path, ["a"])
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        data = packed(Tree(str(tmp_path)))

    assert list(entries(data)) == [".", "./a"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**/*", ["a.log", "b/c.log", "b/c.log.1", "b/d/.e.log", "b/d/f.txt", "g[1]/h.log"]),
        ("*", ["a.log"]),
        ("*.log", ["a.log"]),
        ("**/*.log", ["a.log", "b/c.log", "b/d/.e.log", "g[1]/h.log"]),
        ("b/*.log", ["b/c.log"]),
        ("b/**/*.log", ["b/c.log", "b/d/.e.log"]),
        ("b", ["b/c.log", "b/c.log.1", "b/d/.e.log", "b/d/f.txt"]),
        ("b/", ["b/c.log", "b/c.log.1", "b/d/.e.log", "b/d/f.txt"]),
        ("./b/d", ["b/d/.e.log", "b/d/f.txt"]),
        ("**", ["a.log", "b/c.log", "b/c.log.1", "b/d/.e.log", "b/d/f.txt", "g[1]/h.log"]),
        ("b/?.log", ["b/c.log"]),
        ("b/[a-d].log*", ["b/c.log", "b/c.log.1"]),
        ("b/[^c].log", []),
        ("b/*.*g*1", ["b/c.log.1"]),
        ("b/*.*z*1", []),
        ("[!b].log", ["a.log"]),
        ("{a,x}.log", ["a.log"]),
        ("**/{c,.e}.log", ["b/c.log", "b/d/.e.log"]),
        ("**/**/d/**/*", ["b/d/.e.log", "b/d/f.txt"]),
        (r"g\[1\]/*", ["g[1]/h.log"]),
        ("g[[]1]/*[*g]", ["g[1]/h.log"]),
        ("../*", []),
        ("/a.log", ["a.log"]),
        ("[", []),
        ("b/{c,d/**/*}*", ["b/c.log", "b/c.log.1", "b/d/.e.log", "b/d/f.txt"]),
        ("**/b/**/d/*", ["b/d/.e.log", "b/d/f.txt"]),
        ("{" + "a,b}{" * 30 + ",.log}", []),
        ("nothing", []),
        ("", ["a.log", "b/c.log", "b/c.log.1", "b/d/.e.log", "b/d/f.txt", "g[1]/h.log"]),
        (".", ["a.log", "b/c.log", "b/c.log.1", "b/d/.e.log", "b/d/f.txt", "g[1]/h.log"]),
    ],
)
def test_packing_patterns_select_files(tmp_path: Path, pattern: str, found: list[str]) -> None:
    make(tmp_path, ["a.log", "b/c.log", "b/c.log.1", "b/d/.e.log", "b/d/f.txt", "g[1]/h.log"])

    assert list(entries(packed(Tree(str(tmp_path), patterns=[pattern])))) == [f"./{name}" for name in found]


def test_pathological_packing_patterns_are_matched_quickly(tmp_path: Path) -> None:
    """A backtracking matcher would hang on these nested wildcards."""
    make(tmp_path, ["/".join("a" * 60) + "/" + "a" * 200])

    assert entries(packed(Tree(str(tmp_path), patterns=["**/*/" * 30 + "b", "**/" + "*a" * 40 + "b"]))) == {}


# --- trees that change while they are packed --------------------------------------------------------------------------


def test_log_rotated_during_packing_is_packed_under_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, ["a.log", "b.log", "b.log.1", "b.log.2", "c.log"])

    def rotate() -> None:
        (tmp_path / "b.log.1").rename(tmp_path / "b.log.2")
        (tmp_path / "b.log").rename(tmp_path / "b.log.1.gz")
        (tmp_path / "b.log").write_text("new")

    before_reading(monkeypatch, "b.log", rotate)
    data = logs(tmp_path, "*.log*")

    assert {name: content(data, name) for name in entries(data) if "b" in name} == {
        "./b.log": b"new",
        "./b.log.2": b"b.log.1",
        "./b.log.1.gz": b"b.log",
    }
    assert content(data, "./remarks") == b"./b.log.1: it vanished before it was read\n"


def test_log_renamed_after_it_was_packed_is_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that has also grown since then is packed again under its new name, because its last lines would be lost
    otherwise.
    """
    make(tmp_path, ["a", "b", "z"])

    def rename() -> None:
        (tmp_path / "a").rename(tmp_path / "a.1")
        (tmp_path / "b").rename(tmp_path / "b.1")
        (tmp_path / "b.1").write_text("and more")

    before_reading(monkeypatch, "z", rename)
    data = logs(tmp_path)

    assert {name: content(data, name) for name in entries(data)} == {
        "./a": b"a",
        "./b": b"b",
        "./b.1": b"and more",
        "./z": b"z",
    }


def test_log_that_reappears_is_packed_without_a_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, ["a", "b"])
    before_reading(monkeypatch, "a", (tmp_path / "a").unlink)
    before_reading(monkeypatch, "b", lambda: make(tmp_path, ["a"]))

    assert list(entries(logs(tmp_path))) == ["./b", "./a"]


def test_new_file_with_a_reused_inode_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems reuse inode numbers immediately, so a new file may have the inode number of a packed file."""
    make(tmp_path, ["a", "z"])
    honest = os.fstat
    old = (tmp_path / "a").stat()

    def same_number(fd: int) -> os.stat_result:
        status = honest(fd)
        is_new = status.st_size == len("new one")
        return (
            os.stat_result((*status[:1], old.st_ino, *status[2:]), {"st_mtime_ns": 7, "st_blocks": 8})
            if is_new
            else status
        )

    before_reading(monkeypatch, "z", lambda: (tmp_path / "new").write_text("new one"))
    monkeypatch.setattr(os, "fstat", same_number)

    assert list(entries(logs(tmp_path))) == ["./a", "./z", "./new"]


def test_packing_notes_log_growth_in_the_remarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 600)

    def grow() -> None:
        with (tmp_path / "a").open("ab") as file:
            file.write(b"y" * 25)

    after_seeing_the_size(monkeypatch, 600, grow)
    data = logs(tmp_path)

    assert content(data, "./a") == b"x" * 600
    assert content(data, "./remarks") == b"./a: the last 25 bytes were written during the read and are not packed\n"


def test_packing_notes_log_truncation_in_the_remarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing part is filled with zeros so that the archive stays valid."""
    (tmp_path / "a").write_bytes(b"x" * 600)
    after_seeing_the_size(monkeypatch, 600, lambda: os.truncate(tmp_path / "a", 5))
    data = logs(tmp_path)

    assert content(data, "./a") == b"x" * 5 + bytes(595)
    assert content(data, "./remarks") == (
        b"./a: zeros replace everything after the first 5 of 600 bytes: it was truncated during the read\n"
    )


def test_log_on_a_failing_disk_is_filled_with_zeros_and_noted_in_the_remarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing a package, in contrast, fails after a read error, because a package must be complete."""
    make(tmp_path, ["a", "b"])
    honest = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        found = honest(fd, size, offset)
        if found == b"a":
            raise OSError(5, "Input/output error")
        return found

    monkeypatch.setattr(os, "pread", pread)
    data = logs(tmp_path)

    assert content(data, "./b") == b"b"
    assert content(data, "./remarks") == (
        b"./a: zeros replace everything after the first 0 of 1 bytes: Input/output error\n"
    )
    with pytest.raises(HostError, match=r"^cannot pack \./a: Input/output error$"):
        packed(Tree(str(tmp_path)))


def test_packing_notes_files_without_read_permission_in_the_remarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, ["logs/a", "logs/closed/b", "logs/c", "shut/x"])
    monkeypatch.chdir(tmp_path)
    closed = [tmp_path / "logs" / "c", tmp_path / "logs" / "closed", tmp_path / "shut"]
    with as_ordinary_user(tmp_path, *tmp_path.rglob("*")):
        for path in closed:
            Path(path.relative_to(tmp_path)).chmod(0)
        data = packed(*(Tree(root, patterns=["**/*"]) for root in ("logs", "shut")), remarks="remarks")
        with pytest.raises(HostError, match=r"^cannot pack \./closed: cannot open closed: Permission denied$"):
            packed(Tree("logs"))
        with pytest.raises(HostError, match=r"^cannot pack shut: Permission denied$"):
            packed(Tree("shut"))

    assert list(entries(data)) == ["./a", "./remarks"]
    assert content(data, "./remarks").decode().splitlines() == [
        f"{name}: cannot read it: Permission denied" for name in ("./c", "./closed", "shut")
    ]


@pytest.mark.parametrize(
    ("target", "packed_as"),
    [
        ("out.log.1", "out.log.1"),
        ("../b/x", "../b/x"),
        ("./../b//x", "../b/x"),
        ("{root}/job/out.log.1", "out.log.1"),
        ("{alias}/job/sub/x", "sub/x"),
        ("{root}/b/x", "../b/x"),
        ("..", ".."),
        ("../..", ""),
        ("../../{name}/job/x", ""),
        ("{root}", ""),
        ("{root}-other/x", ""),
        ("{root}/../x", ""),
        ("/etc/shadow", ""),
    ],
)
def test_packed_symlinks_stay_within_the_tree(tmp_path: Path, target: str, packed_as: str) -> None:
    root = tmp_path / "logs"
    make(root, ["job/out.log.1"])
    (tmp_path / "alias").symlink_to(root)
    target = target.format(root=root, alias=tmp_path / "alias", name=root.name)
    (root / "job" / "current").symlink_to(target)
    data = packed(Tree(str(tmp_path / "alias"), patterns=["**/*"]), remarks="remarks")
    found = entries(data)

    if packed_as:
        assert (found["./job/current"].issym(), found["./job/current"].linkname) == (True, packed_as)
        assert "./remarks" not in found
    else:
        assert list(found) == ["./job/out.log.1", "./remarks"]
        said = f"./job/current: it is a link that leads out of the directory, to {target}\n"
        assert content(data, "./remarks").decode() == said


def test_remarks_file_has_the_modification_time_of_the_newest_log(tmp_path: Path) -> None:
    """With a timestamp in 1970, tar would print a warning. With the current time, the archive would not be
    reproducible.
    """
    make(tmp_path, ["a"])
    (tmp_path / "link").symlink_to("/etc")
    os.utime(tmp_path / "a", (1_600_000_000, 1_600_000_000))

    assert entries(logs(tmp_path))["./remarks"].mtime == 1_600_000_000


def test_oversized_compilation_output_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    """A compilation may create a terabyte-sized sparse file, which would otherwise be read and sent as zeros."""
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 42)
    make(tmp_path, ["b"])

    with pytest.raises(HostError, match=r"cannot pack ./a: the files exceed 20 GiB"):
        packed(Tree(str(tmp_path)))


def test_compilation_output_size_limit_does_not_apply_to_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * 1000)
    monkeypatch.setattr(packing, "MAX_FIXED_BYTES", 1000)
    assert len(content(packed(Tree(str(tmp_path))), "./a.log")) == 1000

    monkeypatch.setattr(packing, "MAX_FIXED_BYTES", 999)
    assert len(content(logs(tmp_path), "./a.log")) == 1000
    with pytest.raises(HostError, match="the files exceed"):
        packed(Tree(str(tmp_path)))


# --- hostile files among the logs -------------------------------------------------------------------------------------


def test_sparse_log_is_packed_without_its_holes(tmp_path: Path) -> None:
    """A job can create a terabyte-sized sparse file at no cost. Reading all of it would delay every later task."""
    with (tmp_path / "a.log").open("wb") as file:
        file.write(b"first")
        file.truncate(1 << 43)
        file.seek(0, os.SEEK_END)
        file.write(b"last")
    data = logs(tmp_path)

    assert content(data, "./a.log").replace(b"\0", b"") == b"firstlast"
    assert len(content(data, "./a.log")) < 1 << 20
    assert b"bytes of it are holes" in content(data, "./remarks")
    assert list(entries(data)) == ["./a.log", "./remarks"]


@pytest.mark.attack("a job passes a setuid program to whoever unpacks its logs")
def test_setuid_bits_and_owner_names_of_logs_are_not_packed(tmp_path: Path) -> None:
    (tmp_path / "evil.log").write_text("#!/bin/sh")
    (tmp_path / "evil.log").chmod(0o6755)
    if os.geteuid() == 0:
        os.chown(tmp_path / "evil.log", 1000, 1001)
        (tmp_path / "evil.log").chmod(0o6755)
    status = (tmp_path / "evil.log").stat()

    found = entries(logs(tmp_path))["./evil.log"]

    assert found.mode == 0o755
    assert (found.uid, found.gid, found.uname, found.gname) == (status.st_uid, status.st_gid, "", "")


def test_packing_limits_files_per_job_without_excluding_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_JOB_ENTRIES", 10)
    make(tmp_path, [f"evil/deep/{number}.log" for number in range(30)] + ["good/x.log"])

    data = logs(tmp_path)

    names = list(entries(data))
    assert "./good/x.log" in names
    assert len([name for name in names if "evil" in name]) == 9
    assert content(data, "./remarks") == b"./evil/deep: the rest of it is left out: it has more than 10 files\n"


def test_packing_stops_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LIVE_TIMEOUT_S", 0.0)
    make(tmp_path, ["a.log"])

    data = logs(tmp_path)

    assert list(entries(data)) == ["./remarks"]
    assert content(data, "./remarks") == b".: the archive is incomplete: packing took longer than 0 seconds\n"


@pytest.mark.attack("text from a job forges lines in the agent's log, in alerts or in an archive's remarks")
def test_file_names_cannot_forge_lines_in_the_remarks(tmp_path: Path) -> None:
    (tmp_path / "a\n.: all is well\n\x1b[2J").symlink_to("/etc/passwd")

    assert content(logs(tmp_path), "./remarks").count(b"\n") == 1


def test_packing_a_log_under_a_lease_does_not_block(tmp_path: Path) -> None:
    """A log is skipped while another process has a lease on it, because that process could delay the open by up to 45
    seconds.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    make(tmp_path, ["a.log", "b.log"])
    with (tmp_path / "a.log").open("rb+") as owner:
        fcntl.fcntl(owner.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
        data = logs(tmp_path)
        fcntl.fcntl(owner.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)
    signal.signal(signal.SIGIO, before)

    assert list(entries(data)) == ["./b.log", "./remarks"]
    assert content(data, "./remarks") == b"./a.log: cannot read it: Resource temporarily unavailable\n"


@pytest.mark.parametrize("pattern", ["{a", "a}", "{" * 2000 + "}" * 2000], ids=["open", "closed", "deep"])
def test_packing_patterns_with_unbalanced_or_deep_braces_are_rejected(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(HostError, match="cannot read the pattern"):
        logs(tmp_path, pattern)


def test_braces_in_packing_patterns_are_compiled_to_a_single_expression(tmp_path: Path) -> None:
    """Expanding the braces would create 2**30 patterns."""
    make(tmp_path, ["ab" * 15])

    assert list(entries(logs(tmp_path, "{a,b}" * 30))) == ["./" + "ab" * 15]
