"""Tests ``bosh-agent compile`` with a small release, in a separate base directory."""

from __future__ import annotations

import hashlib
import io
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import msgspec
import pytest

from agent_shim.cli import release_tarball
from agent_shim.cli.compile_release import duration, stemcell_slug
from agent_shim.cli.release_tarball import JobPart, ReleaseManifest, SourcePackage
from agent_shim.core.errors import ConfigError
from agent_shim.core.paths import Paths
from agent_shim.demo.release import archive
from agent_shim.services.volume_lease import exclusive_agent
from tests.support.programs import is_alive
from tests.support.waiting import TIMEOUT_S

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from agent_shim.cli.commands import bosh_agent; sys.exit(bosh_agent(sys.argv[1:]))",
]

LIBRARY = "mkdir $BOSH_INSTALL_TARGET/lib; cp z.txt $BOSH_INSTALL_TARGET/lib"
PROGRAM = """
set -e
cat $(dirname $BOSH_INSTALL_TARGET)/library/lib/z.txt > $BOSH_INSTALL_TARGET/out
ls $(dirname $BOSH_INSTALL_TARGET) >> $BOSH_INSTALL_TARGET/out
"""


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """Return the base directory of a stemcell container."""
    paths = Paths(tmp_path / "vcap")
    paths.bosh_etc.mkdir(parents=True)
    paths.etc.mkdir()
    (paths.bosh_etc / "stemcell_version").write_text("1.234\n")
    (paths.etc / "os-release").write_text('# an image\n\nNAME="Ubuntu"\nID=ubuntu\nVERSION_CODENAME="noble"\n')
    return paths


def release(path: Path, version: str = "1.10", **packages: tuple[str, list[str]]) -> Path:
    """Create a release tarball.

    Each package is given as ``NAME=(packaging script, names of dependencies)``, and its source contains ``z.txt``.
    """
    blobs = {name: archive({"packaging": script, "z.txt": "zz\n"}) for name, (script, _) in packages.items()}
    refs = [
        SourcePackage(name, f"v-{name}", f"f-{name}", hashlib.sha1(blobs[name]).hexdigest(), needed)
        for name, (_, needed) in packages.items()
    ]
    manifest = ReleaseManifest(
        "small", version, "abc", jobs=[JobPart("web", "1", "1", "1", list(packages))], packages=refs
    )
    entries = {"release.MF": release_tarball.render_manifest(manifest), "jobs/web.tgz": b"web"}
    entries |= {f"packages/{name}.tgz": blob for name, blob in blobs.items()}
    with tarfile.open(path, "w:gz") as packed:
        for name, content in entries.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            packed.addfile(header, io.BytesIO(content))
    return path


def compile_with(paths: Paths, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "compile", "-b", str(paths.base), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as packed:
        return {each.name: file.read() for each in packed.getmembers() if (file := packed.extractfile(each))}


def remaining_files(paths: Paths) -> list[Path]:
    places = ("packages/*", "data/packages/*/*", "data/compile/*", "data/tmp/.*", "data/blobs/*.tgz", "data/blobs/*-*")
    return [path for pattern in places for path in paths.base.glob(pattern)]


def test_compile_command_compiles_a_release(paths: Paths, tmp_path: Path) -> None:
    source = release(tmp_path / "in.tgz", program=(PROGRAM, ["library"]), library=(LIBRARY, []))
    out = tmp_path / "made/out"
    done = compile_with(paths, f"-output-directory={out}", source)
    path = out / "small-1.10-ubuntu-noble-1.234.tgz"

    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    blobs = paths.blobs
    expected = rf"""\d{{4}}/\d\d/\d\d \d\d:\d\d:\d\d Compiling with stemcell ubuntu-noble/1\.234
Reading BOSH Release Manifest from tarball {source}
Release small/1\.10 has 2 packages
Extracting packages
Copying package program to {blobs}/program\.tgz
Copying package library to {blobs}/library\.tgz
Starting packages compilation
Compiling package library/v-library
Finished compiling release library/v-library BlobstoreID=[0-9a-f-]{{36}}
Compiling package program/v-program
Finished compiling release program/v-program BlobstoreID=[0-9a-f-]{{36}}
Finished packages compilation after [\d.ms]+
Archiving compiled BOSH Release small/1\.10 with stemcell ubuntu-noble/1\.234
Finished archiving compiled tarball {path}
"""
    assert re.fullmatch(expected, done.stderr), done.stderr

    found = contents(path)
    assert list(found) == [
        "./release.MF",
        "./jobs/web.tgz",
        "./compiled_packages/library.tgz",
        "./compiled_packages/program.tgz",
    ]
    manifest = release_tarball.parse_manifest(found["./release.MF"])
    assert (manifest.name, manifest.version, manifest.packages) == ("small", "1.10", [])
    assert [msgspec.structs.asdict(package) for package in manifest.compiled_packages] == [
        {
            "name": name,
            "version": f"v-{name}",
            "fingerprint": f"f-{name}",
            "sha1": hashlib.sha1(found[f"./compiled_packages/{name}.tgz"]).hexdigest(),
            "stemcell": "ubuntu-noble/1.234",
            "dependencies": needed,
        }
        for name, needed in (("library", []), ("program", ["library"]))
    ]
    with tarfile.open(fileobj=io.BytesIO(found["./compiled_packages/program.tgz"])) as packed:
        file = packed.extractfile("./out")
        assert file is not None
        assert file.read() == b"zz\nlibrary\nprogram\n"
    assert remaining_files(paths) == []


def test_compile_command_output_is_reproducible(paths: Paths, tmp_path: Path) -> None:
    first = release(tmp_path / "1.tgz", "1", library=(LIBRARY, []))
    done = compile_with(paths, "--output-directory", tmp_path / "a", first)
    again = compile_with(paths, "--output-directory", tmp_path / "b", release(tmp_path / "2.tgz", "2"), first)

    assert (done.returncode, again.returncode) == (0, 0), again.stderr
    name = "small-1-ubuntu-noble-1.234.tgz"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [name, name.replace("-1-", "-2-")]


def test_compile_command_reports_a_failed_package(paths: Paths, tmp_path: Path) -> None:
    source = release(tmp_path / "in.tgz", good=(LIBRARY, []), worse=("echo so it is >&2; exit 3", ["good"]))
    done = compile_with(paths, "-output-directory", tmp_path / "out", source)

    assert done.returncode == 1
    assert "\nfailed to compile package worse/v-worse: Running packaging script: " in done.stderr
    assert "Command exited with 3" in done.stderr
    assert "so it is" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []
    assert remaining_files(paths) == []


def test_compile_command_refuses_to_run_while_an_agent_runs(paths: Paths, tmp_path: Path) -> None:
    """The agent uses the packages in the base directory, where the command would install other packages."""
    with exclusive_agent(paths, "test"):
        done = compile_with(paths, "-output-directory", tmp_path, release(tmp_path / "in.tgz"))

    assert done.returncode == 1
    assert "cannot compile: another agent, process " in done.stderr


def test_compile_command_refuses_to_replace_a_package_that_a_job_uses(paths: Paths, tmp_path: Path) -> None:
    version = hashlib.sha1(b"1-0123").hexdigest()
    installed = paths.data_packages / "library" / version
    installed.mkdir(parents=True)
    spec = {
        "job": {"templates": [{"name": "web", "version": "1"}]},
        "rendered_templates_archive": {"blobstore_id": "x", "sha1": "0123"},
        "packages": {"library": {"name": "library", "version": "1", "sha1": "0123", "blobstore_id": "x"}},
    }
    paths.spec.write_bytes(msgspec.json.encode(spec))
    other = compile_with(paths, "-output-directory", tmp_path, release(tmp_path / "in.tgz", other=(LIBRARY, [])))
    same = compile_with(paths, "-output-directory", tmp_path, release(tmp_path / "in.tgz", library=(LIBRARY, [])))

    assert other.returncode == 0, other.stderr
    assert same.returncode == 1
    assert "jobs of this instance use another version of package library" in same.stderr
    assert (paths.packages / "library").readlink() == installed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_compile_command_kills_its_compilation(
    paths: Paths, tmp_path: Path, number: signal.Signals
) -> None:
    pids = tmp_path / "pids"
    script = f"setsid sleep 600 & echo $! >> {pids}; trap '' TERM; sleep 600 & echo $! >> {pids}; wait"
    source = release(tmp_path / "in.tgz", library=(script, []))
    command = [*COMMAND, "compile", "-b", str(paths.base), "-output-directory", str(tmp_path), str(source)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not (pids.exists() and len(pids.read_text().split()) == 2) and time.monotonic() < deadline:
                time.sleep(0.02)
            started = [int(pid) for pid in pids.read_text().split()]
            assert [is_alive(pid) for pid in started] == [True, True]
            running.send_signal(number)
            assert running.wait(TIMEOUT_S) == 130
        finally:
            running.kill()

    assert [is_alive(pid) for pid in started] == [False, False]
    assert remaining_files(paths) == []
    assert list(tmp_path.glob("small-*")) == []


def test_compile_command_prints_help_and_reports_wrong_flags_and_missing_tarballs(paths: Paths, tmp_path: Path) -> None:
    helped, wrong = compile_with(paths, "-help"), compile_with(paths, "-output", "/x")
    missing = compile_with(paths, "-output-directory", tmp_path, tmp_path / "nowhere.tgz")

    assert helped.returncode == 0
    assert "--output-directory DIR" in helped.stdout
    assert "(default: /tmp)" in helped.stdout
    assert wrong.returncode == 2
    assert missing.returncode == 1
    text = f"failed to parse release manifest: cannot open {tmp_path}/nowhere.tgz: No such file or directory\n"
    assert missing.stderr.endswith(text)


# --- stemcell name and version ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("bosh/etc/stemcell_version", None, "stemcell_version: No such file or directory"),
        ("bosh/etc/stemcell_version", "", "has no valid version"),
        ("bosh/etc/stemcell_version", "../1", "has no valid version"),
        ("bosh/etc/stemcell_version", "\udcff", "stemcell_version: 'utf-8' codec can't decode"),
        ("etc/os-release", "ID=ubuntu\n", "os-release: VERSION_CODENAME not found"),
        ("etc/os-release", "VERSION_CODENAME=noble\n", "os-release: ID not found"),
        ("etc/os-release", 'ID="ubuntu\n', "No closing quotation"),
    ],
)
def test_compile_command_reports_a_missing_or_invalid_stemcell_name_or_version(
    paths: Paths, name: str, text: str | None, why: str
) -> None:
    file = paths.base / name
    file.unlink() if text is None else file.write_text(text, errors="surrogateescape")

    with pytest.raises(ConfigError, match=re.escape(why)):
        stemcell_slug(paths)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.26, "260ms"), (1.25, "1.25s"), (60, "1m0s"), (123.5, "2m3.5s"), (3603.5, "1h0m3.5s")],
)
def test_compile_command_prints_durations_as_go_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
