"""Tests archive unpacking: a valid archive gives the same tree as with GNU tar, and a hostile one leaves no
files behind.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_shim.bulk import archive, compression
from agent_shim.core.errors import ArchiveError
from tests.support.users import as_ordinary_user

END = bytes(1024)


def zipped(data: bytes) -> bytes:
    """Return the data compressed with gzip. The header has no timestamp, so the result is reproducible."""
    return gzip.compress(data, mtime=0)


def member(name: str, data: bytes = b"", **fields: Any) -> bytes:
    """Return the bytes of an archive member: a header with the given ``fields``, followed by the padded data."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % 512)


def link(name: str, target: str, *, hard: bool = False) -> bytes:
    return member(name, type=tarfile.LNKTYPE if hard else tarfile.SYMTYPE, linkname=target)


def directory(name: str, mode: int = 0o755) -> bytes:
    return member(name, type=tarfile.DIRTYPE, mode=mode)


def pax(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return member("pax", records, type=kind)


def record(key: str, value: str) -> bytes:
    """Return a pax record. Its length field also counts its own digits."""
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def file(data: bytes) -> io.BufferedRandom:
    """Return an open file that contains ``data``."""
    opened = os.fdopen(os.memfd_create("archive"), "w+b")
    opened.write(data)
    opened.flush()
    return opened


def unpack(data: bytes, into: Path, **options: Any) -> None:
    with file(data) as source:
        archive.unpack(source, into, **options)


Entry = tuple[int, int, int, object]


def listing(tree: Path, *, times: bool = True) -> dict[str, Entry]:
    """Return the mode, modification time, number of hard links and content of each path in the tree.

    The time is in whole seconds, or 0 without ``times``. Links are counted only for files.
    """
    found: dict[str, Entry] = {}
    for path in [tree, *tree.rglob("*")]:
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = path.read_bytes()
        names = status.st_nlink if path.is_file() and not path.is_symlink() else 0
        when = int(status.st_mtime) if times else 0
        found[str(path.relative_to(tree))] = (stat.S_IMODE(status.st_mode), when, names, content)
    return found


def make_tree(tree: Path) -> None:
    """Create a tree with every kind of entry that packages contain."""
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "run").write_bytes(b"#!/bin/sh\n")
    (tree / "bin" / "run").chmod(0o4755)
    (tree / "empty").mkdir(mode=0o700)
    (tree / "deep" / ("d" * 90) / ("e" * 90)).mkdir(parents=True)
    (tree / "deep" / ("d" * 90) / ("e" * 90) / "file").write_bytes(os.urandom(200_000))
    (tree / "naïve \n name").write_bytes(b"x" * 512)
    (tree / os.fsdecode(b"no-\xff-utf8")).write_bytes(b"")
    (tree / "twin").hardlink_to(tree / "bin" / "run")
    (tree / "to-file").symlink_to("bin/run")
    (tree / "to-dir").symlink_to("bin")
    (tree / "bin" / "back").symlink_to("../twin")
    (tree / "closed").mkdir()
    (tree / "closed" / "file").write_bytes(b"y")
    (tree / "closed").chmod(0o555)
    for path in [tree, *tree.rglob("*")]:
        os.utime(path, (1_000_000_000, 1_000_000_000 + len(path.name)), follow_symlinks=False)


# --- valid archives ---------------------------------------------------------------------------------------------------


COMPRESSIONS = ("gzip", "bzip2", "xz", "lzma", "zstd", "lzip", "lzop", "compress")


def compressed(data: bytes, program: str) -> bytes:
    """Compress ``data`` with ``program``. Skip the test if the program is not installed."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    return subprocess.run([program, "-cf"], input=data, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.parametrize("program", COMPRESSIONS)
def test_compressed_archives_are_unpacked(tmp_path: Path, program: str) -> None:
    make_tree(tmp_path / "tree")
    packed = subprocess.run(["tar", "-c", "-C", tmp_path / "tree", "."], stdout=subprocess.PIPE, check=True).stdout
    with file(compressed(packed, program)) as source:
        assert compression.is_compressed(source)
        archive.unpack(source, tmp_path / "unpacked")

    assert listing(tmp_path / "unpacked") == listing(tmp_path / "tree")


@pytest.mark.parametrize("program", [each for each in COMPRESSIONS if each != "gzip"])
@pytest.mark.parametrize("where", ["end", "middle"])
def test_truncated_compressed_archives_are_rejected(tmp_path: Path, program: str, where: str) -> None:
    if (program, where) == ("compress", "end"):
        pytest.skip("this format marks no end")
    packed = compressed(member("a", os.urandom(300_000)) + END + bytes(100_000), program)
    kept = len(packed) - 12 if where == "end" else len(packed) // 2

    with pytest.raises(ArchiveError, match="cannot unpack the archive: "):
        unpack(packed[:kept], tmp_path / "o")

    assert not (tmp_path / "o").exists()


def test_oversized_compressed_archive_is_abandoned_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 1 << 20)
    packed = compressed(member("a") + member("b", bytes(1 << 20)) + END, "xz")

    with pytest.raises(ArchiveError, match="its size is|too large"):
        unpack(packed, tmp_path / "o")


def test_unpacking_error_names_a_missing_decompression_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "ENVIRONMENT", {"PATH": str(tmp_path)})
    with pytest.raises(ArchiveError, match="it is compressed, and there is no program zstd"):
        unpack(b"\x28\xb5\x2f\xfd" + bytes(1000), tmp_path / "o")


def test_tar_whose_first_name_resembles_a_compression_header_is_unpacked(tmp_path: Path) -> None:
    with file(member("BZh", b"x") + END) as source:
        assert not compression.is_compressed(source)
        archive.unpack(source, tmp_path / "o")
    assert (tmp_path / "o/BZh").read_bytes() == b"x"


@pytest.mark.parametrize("kind", ["gnu", "pax", "posix", "ustar", "oldgnu"])
@pytest.mark.parametrize("compress", ["-z", "--no-auto-compress"])
def test_unpacked_tree_matches_gnu_tar(tmp_path: Path, kind: str, compress: str) -> None:
    make_tree(tmp_path / "tree")
    packed = tmp_path / "a.tgz"
    subprocess.run(["tar", f"--format={kind}", compress, "-cf", packed, "-C", tmp_path / "tree", "."], check=True)
    (tmp_path / "theirs").mkdir()
    subprocess.run(["tar", "--no-same-owner", "-pxf", packed, "-C", tmp_path / "theirs"], check=True)
    with packed.open("rb") as source:
        archive.unpack(source, tmp_path / "ours")

    assert listing(tmp_path / "ours") == listing(tmp_path / "theirs")
    assert len(listing(tmp_path / "ours")) == 16


@pytest.mark.parametrize("prefix", ["", "./"])
def test_only_the_requested_subtree_of_an_archive_is_unpacked(tmp_path: Path, prefix: str) -> None:
    """Member names begin with ``./`` if the Director has packed the archive for the blobstore, but not if it sends the
    archive over the bus.
    """
    packed = zipped(
        directory(f"{prefix}web", 0o750)
        + member(f"{prefix}web/bin/run", b"web", mode=0o755)
        + member(f"{prefix}web2/monit", b"other")
        + link(f"{prefix}web/twin", f"{prefix}web/bin/run", hard=True)
        + END
    )
    unpack(packed, tmp_path / "o", subtree="web")

    assert sorted(listing(tmp_path / "o")) == [".", "bin", "bin/run", "twin"]
    assert (tmp_path / "o" / "twin").read_bytes() == b"web"
    assert stat.S_IMODE((tmp_path / "o").stat().st_mode) == 0o750


@pytest.mark.parametrize(
    ("packed", "text"),
    [
        (zipped(member("web2/x") + END), "no file with prefix 'web' found"),
        (zipped(member("web") + END), "no file with prefix 'web' found"),
        (zipped(END), "no file with prefix 'web' found"),
        (member("web/x") + END, "the archive is not gzip"),
    ],
)
def test_error_for_a_job_missing_from_an_archive_matches_the_go_agent(tmp_path: Path, packed: bytes, text: str) -> None:
    with pytest.raises(ArchiveError) as caught:
        unpack(packed, tmp_path / "o", subtree="web")

    assert str(caught.value) == f"Detecting prefix of package files: {text}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "packed",
    [
        member("a", b"old") + member("a", b"new") + END,
        link("a", "b") + member("a", b"new") + END,
        zipped(member("a", b"new")) + zipped(END),
        zipped(member("a", b"new") + END) + bytes(512),
        member("a", b"new"),
        member("label", type=b"V") + member("a", b"new") + END + b"what follows the end is not read",
        pax(record("path", "a") + record("mtime", "1.5")) + member("b", b"new") + END,
        pax(record("size", "3"), tarfile.XGLTYPE) + member("a", b"new") + END,
        pax(record("comment", "x")) + member("a", b"new", type=tarfile.AREGTYPE) + END,
        member("a", b"new", type=tarfile.CONTTYPE) + END,
    ],
)
def test_unusual_but_valid_archives_are_unpacked(tmp_path: Path, packed: bytes) -> None:
    unpack(packed, tmp_path / "o")

    assert {path.name: path.read_bytes() for path in (tmp_path / "o").iterdir()} == {"a": b"new"}


@pytest.mark.parametrize("kind", [tarfile.AREGTYPE, tarfile.REGTYPE])
def test_archive_member_whose_name_ends_with_a_slash_is_a_directory(tmp_path: Path, kind: bytes) -> None:
    """Old versions of tar write directories this way, and GNU tar accepts them."""
    unpack(member("d/", type=kind, mode=0o755) + member("d/a", b"new") + link("l/", "d") + END, tmp_path / "o")

    assert (tmp_path / "o/d/a").read_bytes() == b"new"
    assert (tmp_path / "o/l").is_symlink()


@pytest.mark.parametrize("subtree", ["", "d"])
def test_symlinks_in_an_archive_may_have_any_target(tmp_path: Path, subtree: str) -> None:
    """Compiled packages contain absolute symlinks. Like GNU tar, the agent creates them but does not follow them."""
    packed = link("d/a", "/var/vcap/packages/x") + link("d/b", "../../y") + link("d/c", "d/b", hard=True) + END
    unpack(zipped(packed), tmp_path / "o", subtree=subtree)

    below = tmp_path / "o" / ("" if subtree else "d")
    assert (below / "a").readlink() == Path("/var/vcap/packages/x")
    assert (below / "b").readlink() == (below / "c").readlink() == Path("../../y")


def test_out_of_range_time_in_an_archive_is_clamped(tmp_path: Path) -> None:
    packed = member("a", mtime=-(2**40)) + pax(record("mtime", str(10**30))) + member("b") + END
    unpack(packed, tmp_path / "o")

    assert (tmp_path / "o" / "a").stat().st_mtime == 0
    assert (tmp_path / "o" / "b").stat().st_mtime == 2**33


def test_unpacking_into_an_existing_directory_fails_without_changes(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "kept").touch()
    with pytest.raises(ArchiveError, match="File exists"):
        unpack(member("a") + END, tmp_path / "o")

    assert sorted(listing(tmp_path / "o")) == [".", "kept"]


# --- hostile archives -------------------------------------------------------------------------------------------------


def with_size(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a header that claims a size too large for its octal field."""
    return with_number(124, 12, size, kind)


def with_number(at: int, width: int, number: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header of a file named ``a``, with ``number`` encoded in base 256 in the ``width``-byte field at
    offset ``at``.
    """
    info = tarfile.TarInfo("a")
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "big")
    block[at] |= 0x80
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def with_wrong_sum() -> bytes:
    block = bytearray(member("b"))
    block[0] ^= 1
    return bytes(block)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "absolute": (member("/etc/passwd", b"x"), "'/etc/passwd': it is not a path inside the archive"),
    "up": (member("../evil", b"x"), "'../evil': it is not a path inside the archive"),
    "up in the middle": (member("a/../../evil", b"x"), "it is not a path inside the archive"),
    "absolute by pax": (pax(record("path", "/evil")) + member("a", b"x"), "it is not a path inside the archive"),
    "up by a long name": (
        member("././@LongLink", b"../" * 50 + b"evil\0", type=tarfile.GNUTYPE_LONGNAME) + member("a", b"x"),
        "it is not a path inside the archive",
    ),
    "zero byte in a name": (pax(record("path", "a\0b")) + member("a"), "it is not a path inside the archive"),
    "zero byte in a target": (pax(record("linkpath", "a\0b")) + link("a", "b"), "'a': its target is empty or invalid"),
    "link without target": (link("a", ""), "'a': its target is empty or invalid"),
    "write through a link": (link("a", ".") + member("a/evil", b"x"), "'a/evil': 'a' is a link"),
    "directory through a link": (link("a", ".") + directory("a/evil"), "'a' is a link"),
    "link through a link": (link("a", ".") + link("a/b", "."), "'a' is a link"),
    "hard link up": (link("a", "../evil", hard=True), "'../evil': it is not a path inside the archive"),
    "absolute hard link": (link("a", "/etc/passwd", hard=True), "it is not a path inside the archive"),
    "hard link through a link": (link("a", ".") + member("b") + link("c", "a/b", hard=True), "'c': it is a link to"),
    "hard link to nothing": (
        link("a", "b", hard=True),
        "'a': it is a link to 'b', which is not a file unpacked before it",
    ),
    "hard link to itself": (member("a") + link("a", "a", hard=True), "'a': it is a link to 'a'"),
    "hard link to a directory": (directory("d") + link("a", "d", hard=True), "'a': it is a link to 'd'"),
    "character device": (member("a", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "'a': it is neither file"),
    "block device": (member("a", type=tarfile.BLKTYPE), "'a': it is neither file"),
    "fifo": (member("a", type=tarfile.FIFOTYPE), "'a': it is neither file"),
    "unknown kind": (member("a", type=b"Z"), "'a': it is neither file"),
    "file in the place of all": (member(".", b"x"), "'.': it would replace the target directory"),
    "link in the place of all": (link(".", "a"), "'.': it would replace the target directory"),
    "file below a file": (member("a") + member("a/b"), "'a/b': 'a' is not a directory"),
    "directory for a file": (member("a") + directory("a"), "'a': 'a' is not a directory"),
    "file for a directory": (directory("a") + member("a"), "'a': the archive also contains a directory of this name"),
    "name too long": (member("a" * 300), "File name too long"),
    "zeros": (zipped(member("a", bytes(40_000)) + member("b", bytes(40_000))), "it is too large when unpacked"),
    "too large": (member("a", os.urandom(70_000)), "it is too large when unpacked"),
    "large only in its header": (member("a", size=2**40), "'a': its size is 1099511627776"),
    "negative size": (with_size(-512), "its size is -512"),
    "negative size by pax": (member("b") + pax(record("size", "-1024")) + member("a"), "cannot unpack the archive"),
    "endless extended header": (pax(b"0 path=a\n") + member("a"), "invalid header"),
    "negative long name": (with_size(-512, tarfile.GNUTYPE_LONGNAME) + member("a"), "'a': its size is -512"),
    "negative extended header": (with_size(-512, tarfile.XHDTYPE) + member("a"), "'a': its size is -512"),
    "endless chain of headers": (member("a", b"n", type=tarfile.GNUTYPE_LONGNAME) * 2000, "maximum recursion depth"),
    "wrong sum in the middle": (member("a") + with_wrong_sum() + member("c"), "bad checksum"),
    "cut in a header": (member("a") + member("b")[:300], "truncated header"),
    "cut in a file": (member("a", b"x" * 5000)[:2000], "'a': it ends in the middle of a file"),
    "cut in the padding": (member("a", b"x" * 5000)[:5600], "unexpected end of data"),
    "cut gzip": (zipped(member("a", os.urandom(5000)))[:3000], "ended before"),
    "broken gzip": (zipped(member("a"))[:10] + b"\xff" * 600, "cannot unpack the archive"),
    "garbage after gzip": (zipped(member("a")) + b"garbage" * 100, "cannot unpack the archive"),
    "no archive": (b"<html>404 not found</html>" * 100, "cannot unpack the archive"),
    "file with holes": (member("a", type=tarfile.GNUTYPE_SPARSE), "'a': it is stored as a file with holes"),
}


def test_out_of_range_mode_in_an_archive_is_reduced_to_twelve_bits(tmp_path: Path) -> None:
    """Python accepts only 32 bits for a mode, so a larger mode would raise an ``OverflowError``."""
    unpack(with_number(100, 8, 2**40 + 0o640), tmp_path / "into")
    assert (tmp_path / "into/a").stat().st_mode & 0o7777 == 0o640


@pytest.mark.attack("a blobstore delivers an archive that is damaged or takes too long to unpack")
@pytest.mark.parametrize("kind", ["check", "length", "cut", "cut before the check", "garbage"])
@pytest.mark.parametrize("padding", [0, 100_000])
def test_damaged_gzip_trailer_is_detected(tmp_path: Path, kind: str, padding: int) -> None:
    packed = bytearray(zipped(member("a", b"x") + END + bytes(padding)))
    match kind:
        case "check":
            packed[-8] ^= 1
        case "length":
            packed[-4] ^= 1
        case "cut":
            del packed[-8:]
        case "cut before the check":
            del packed[-10:]
        case "garbage":
            packed += b"garbage"
    (source := tmp_path / "archive").write_bytes(packed)
    (tmp_path / "by-tar").mkdir()

    with pytest.raises(ArchiveError, match="cannot unpack the archive: "):
        unpack(bytes(packed), tmp_path / "o")

    assert not (tmp_path / "o").exists()
    if not padding:  # With padding, tar stops before it reaches the damage.
        assert subprocess.run(["tar", "-xzf", source, "-C", tmp_path / "by-tar"], check=False).returncode


@pytest.mark.attack("a blobstore delivers an archive that writes outside its directory")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archive_is_rejected_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 70_000)
    packed, text = HOSTILE[name]
    (tmp_path / "below").mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ArchiveError) as caught:
        unpack(packed, tmp_path / "below" / "o")

    assert text in str(caught.value)
    assert str(caught.value).startswith("cannot unpack the archive: ")
    assert [path.name for path in tmp_path.rglob("*")] == ["below"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.attack("a blobstore delivers an archive that writes outside its directory")
@pytest.mark.parametrize("target", ["..", "/etc", "../evil", "d/.."])
def test_unpacking_does_not_write_through_symlinks(tmp_path: Path, target: str) -> None:
    with pytest.raises(ArchiveError, match="is a link"):
        unpack(link("d", ".") + link("x", target) + member("x/evil", b"x") + END, tmp_path / "o")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.attack("a blobstore delivers an archive that writes outside its directory")
def test_hard_link_in_a_job_archive_stays_within_the_job(tmp_path: Path) -> None:
    packed = zipped(member("db/key") + member("web/key") + link("web/a", "db/key", hard=True) + END)
    with pytest.raises(ArchiveError, match="'web/a': its target is outside the directory to unpack"):
        unpack(packed, tmp_path / "o", subtree="web")


def test_unpacking_sets_directory_modes_after_creating_the_files() -> None:
    """If a read-only directory got its mode first, an ordinary user could not create the files in it."""
    packed = directory("a", 0o000) + directory("a/b", 0o500) + member("a/b/c") + link("a/b/d", "c") + END
    with tempfile.TemporaryDirectory() as scratch:
        with as_ordinary_user(Path(scratch)):
            unpack(packed, Path(scratch, "o"))
        closed = stat.S_IMODE(Path(scratch, "o", "a").stat().st_mode)
        Path(scratch, "o", "a").chmod(0o700)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path(scratch).rglob("*")}

    assert closed == 0
    assert modes == {"o": 0o755, "a": 0o700, "b": 0o500, "c": 0o644, "d": 0o644}


def test_long_member_name_is_truncated_in_the_archive_error() -> None:
    with pytest.raises(ArchiveError) as caught:
        unpack(pax(record("path", "../" + "x" * 5000)) + member("a"), Path("o"))

    assert len(str(caught.value)) < 400


def test_full_disk_during_unpacking_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ArchiveError, match="'a': No space left on device"):
        unpack(member("a", b"x") + END, tmp_path / "o")

    assert list(tmp_path.iterdir()) == []


def base_archives() -> list[bytes]:
    whole = (
        directory("d")
        + member("d/f", b"data")
        + link("d/l", "f")
        + link("d/h", "d/f", hard=True)
        + pax(record("path", "p") + record("mtime", "1.25"))
        + member("x", b"y" * 600)
        + END
    )
    return [whole, zipped(whole)]


@pytest.mark.attack("a blobstore delivers an archive that is damaged or takes too long to unpack")
@given(which=st.integers(0, 1), changes=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_archive_is_either_rejected_or_unpacked(
    tmp_path_factory: pytest.TempPathFactory, which: int, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(base_archives()[which])
    for place, value in changes:
        data[place % len(data)] = value
    below = tmp_path_factory.mktemp("fuzz")
    try:
        unpack(bytes(data), below / "o")
    except ArchiveError:
        assert list(below.iterdir()) == []

    assert [path.name for path in below.iterdir()] in ([], ["o"])


@pytest.mark.attack("a blobstore delivers an archive that is damaged or takes too long to unpack")
def test_unpacking_fails_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "TIMEOUT_S", 0.0)
    with pytest.raises(ArchiveError, match="it took longer than 0 seconds"):
        unpack(member("a") + END, tmp_path / "o")
