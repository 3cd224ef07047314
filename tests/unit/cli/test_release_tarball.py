"""Tests reading and writing release.MF and compiled release tarballs in the Go agent's format."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import yaml

from agent_shim.cli import release_tarball
from agent_shim.cli.release_tarball import CompiledPackage, JobPart, License, ReleaseManifest, SourcePackage
from agent_shim.core.errors import ActionError, ArchiveError, ConfigError, DigestError


def tarball(path: Path, *entries: tuple[str, bytes | None], mode: Literal["w", "w:gz"] = "w:gz") -> Path:
    """Create an archive with ``entries``. An entry whose content is None is a directory."""
    with tarfile.open(path, mode) as packed:
        for name, content in entries:
            header = tarfile.TarInfo(name)
            header.mode, header.mtime, header.uid, header.uname = 0o600, 1_700_000_000, 1000, "builder"
            if content is None:
                header.type, header.mode = tarfile.DIRTYPE, 0o755
            header.size = len(content or b"")
            packed.addfile(header, io.BytesIO(content or b""))
    return path


def source(name: str, *dependencies: str) -> SourcePackage:
    return SourcePackage(name, "1", "1", hashlib.sha1(name.encode()).hexdigest(), list(dependencies))


def names(packages: Sequence[SourcePackage]) -> list[str]:
    return [package.name for package in packages]


# --- release.MF -------------------------------------------------------------------------------------------------------


def test_release_manifest_values_are_read_as_text() -> None:
    """YAML would read the version ``1.10`` as the number 1.1, and the hash ``12e34`` as a number with an exponent."""
    manifest = release_tarball.parse_manifest(
        b"name: a\nversion: 1.10\ncommit_hash: 12e34\nuncommitted_changes: true\nmore: 1\n"
        b"jobs: [{name: j, version: 010, packages: [p]}]\n"
        b"packages: [{name: p, sha1: 0777, dependencies: ~}]\nlicense:\n"
    )

    assert manifest == ReleaseManifest(
        "a", "1.10", "12e34", True, [JobPart("j", "010", packages=["p"])], [SourcePackage("p", sha1="0777")]
    )


@pytest.mark.parametrize("raw", [b"name: [a]", b"[]", b"name: {", b"\xff\xfe\xff", b"packages: 7"])
def test_invalid_release_manifest_is_rejected(raw: bytes) -> None:
    with pytest.raises(ConfigError, match=r"cannot read release\.MF: "):
        release_tarball.parse_manifest(raw)


def test_compiled_release_manifest_has_the_same_members_as_from_the_go_agent() -> None:
    manifest = ReleaseManifest("a", "1.10", "12e34", license=License("l", "l", "l"), packages=[source("p")])
    compiled = release_tarball.compiled_manifest(manifest, [CompiledPackage("p", "1", "1", "5", "debian-x/1", ["q"])])
    raw = release_tarball.render_manifest(compiled)

    assert list(yaml.safe_load(raw).items()) == [
        ("name", "a"),
        ("version", "1.10"),
        ("commit_hash", "12e34"),
        ("uncommitted_changes", False),
        (
            "compiled_packages",
            [
                {"name": "p", "version": "1", "fingerprint": "1", "sha1": "5", "stemcell": "debian-x/1"}
                | {"dependencies": ["q"]}
            ],
        ),
        ("license", {"version": "l", "fingerprint": "l", "sha1": "l"}),
        ("no_compression", False),
    ]
    assert b"commit_hash: '12e34'" in raw
    assert release_tarball.parse_manifest(raw) == compiled


# --- order of packages ------------------------------------------------------------------------------------------------


def test_packages_are_ordered_by_dependencies_and_then_by_name() -> None:
    packages = [source("d"), source("b", "d", "c"), source("a", "c"), source("c")]

    assert names(release_tarball.in_order(packages)) == ["c", "a", "d", "b"]


@pytest.mark.parametrize(
    ("packages", "text"),
    [
        ([source("a", "b"), source("b", "a")], "cycle detected: package b depends on a"),
        ([source("a", "a")], "cycle detected: package a depends on a"),
        ([source("a", "zlib")], "package a depends on zlib, which is not in release.MF"),
    ],
)
def test_cyclic_or_missing_package_dependencies_are_rejected(packages: list[SourcePackage], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        release_tarball.in_order(packages)


# --- reading a tarball ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["w:gz", "w"])
@pytest.mark.parametrize("name", ["release.MF", "./release.MF"])
def test_release_manifest_is_found_in_any_tarball(tmp_path: Path, mode: Literal["w", "w:gz"], name: str) -> None:
    path = tarball(tmp_path / "r", ("jobs/release.MF", b"name: no"), (name, b"name: a\nversion: 1"), mode=mode)

    assert release_tarball.read_manifest(path) == ReleaseManifest("a", "1")


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        (b"name: ../a\nversion: 1", "as the name of a release"),
        (b"name: a\nversion: 1/2", "as the name of a release with the version"),
        (b"name: a\nversion: 1\npackages: [{name: ../p}]", "as the name of a package"),
        (b"name: a\nversion: 1\ncompiled_packages: [{stemcell: debian-x/1}]", "compiled already, for debian-x/1"),
        (None, "failed to find release.MF in tarball"),
    ],
)
def test_release_that_cannot_be_compiled_is_rejected(tmp_path: Path, manifest: bytes | None, text: str) -> None:
    path = tarball(tmp_path / "r.tgz", *([("release.MF", manifest)] if manifest else [("other", b"")]))

    with pytest.raises((ConfigError, ActionError), match=text):
        release_tarball.read_manifest(path)


def test_release_packages_are_extracted_and_verified(tmp_path: Path) -> None:
    manifest = ReleaseManifest("a", "1", packages=[source("p"), source("q")])
    good = tarball(tmp_path / "good.tgz", ("packages/", None), ("./packages/q.tgz", b"q"), ("packages/p.tgz", b"p"))
    into = tmp_path / "blobs"
    into.mkdir()

    assert list(release_tarball.extract_packages(good, manifest, into)) == [
        ("q", into / "q.tgz"),
        ("p", into / "p.tgz"),
    ]
    assert (into / "p.tgz").read_bytes() == b"p"

    (into / "p.tgz").unlink()
    bad = tarball(tmp_path / "bad.tgz", ("packages/p.tgz", b"other"))
    with pytest.raises(DigestError, match=r"packages/p\.tgz: Expected stream to have digest"):
        list(release_tarball.extract_packages(bad, manifest, into))
    assert not (into / "p.tgz").exists()

    unknown = tarball(tmp_path / "unknown.tgz", ("packages/x.tgz", b"x"))
    with pytest.raises(ArchiveError, match=r"package not found in release manifest: packages/x\.tgz"):
        list(release_tarball.extract_packages(unknown, manifest, into))

    few = tarball(tmp_path / "few.tgz", ("packages/p.tgz", b"p"))
    with pytest.raises(ArchiveError, match=r"packages/q\.tgz is not in the tarball"):
        list(release_tarball.extract_packages(few, manifest, into))


# --- writing a tarball ------------------------------------------------------------------------------------------------


REST = [("license.tgz", b"license"), ("LICENSE", b"free")]


@pytest.mark.parametrize(
    "packages",
    [
        [("packages/", None), ("packages/p.tgz", b"source")],
        [("packages/p.tgz", b"source"), ("packages/q.tgz", b"source")],
    ],
)
def test_compiled_packages_replace_the_sources_in_the_release(
    tmp_path: Path, packages: list[tuple[str, bytes | None]]
) -> None:
    before = [("release.MF", b"name: a"), ("jobs/", None), ("jobs/web.tgz", b"web")]
    path = tarball(tmp_path / "r.tgz", *before, *packages, *REST)
    (tmp_path / "blob").write_bytes(b"compiled")
    out = tmp_path / "out.tgz"
    release_tarball.write_compiled(path, out, ReleaseManifest("b"), {"p": tmp_path / "blob"})

    with tarfile.open(out, "r:gz") as packed:
        members = packed.getmembers()
        found = {each.name: file.read() for each in members if (file := packed.extractfile(each))}
    assert [(each.name, each.mode) for each in members] == [
        ("./release.MF", 0o644),
        ("./jobs", 0o755),
        ("./jobs/web.tgz", 0o644),
        ("./compiled_packages", 0o755),
        ("./compiled_packages/p.tgz", 0o644),
        ("./license.tgz", 0o644),
        ("./LICENSE", 0o644),
    ]
    assert {(each.uid, each.uname, each.mtime) for each in members} == {(0, "root", 0)}
    assert release_tarball.parse_manifest(found.pop("./release.MF")) == ReleaseManifest("b")
    assert found == {
        "./jobs/web.tgz": b"web",
        "./compiled_packages/p.tgz": b"compiled",
        "./license.tgz": b"license",
        "./LICENSE": b"free",
    }


def test_uncompressed_release_stays_uncompressed(tmp_path: Path) -> None:
    path = tarball(tmp_path / "r.tar", ("release.MF", b"name: a"), mode="w")
    release_tarball.write_compiled(path, tmp_path / "out", ReleaseManifest("a", no_compression=True), {})

    with tarfile.open(tmp_path / "out", "r:") as packed:
        assert packed.getnames() == ["./release.MF"]


def test_release_tarball_is_removed_if_writing_it_fails(tmp_path: Path) -> None:
    path = tarball(tmp_path / "r.tgz", ("packages/p.tgz", b"source"))
    out = tmp_path / "out"
    out.mkdir()

    with pytest.raises(FileNotFoundError, match="nowhere"):
        release_tarball.write_compiled(path, out / "r.tgz", ReleaseManifest("a"), {"p": tmp_path / "nowhere"})
    assert list(out.iterdir()) == []
