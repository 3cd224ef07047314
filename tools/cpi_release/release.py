"""``./dev cpi-release`` builds a BOSH release with the CPI, for ``bosh upload-release`` and ``bosh create-env``.

The properties of the release's ``kubernetes_cpi`` job are generated from the CPI's configuration types. The
package contains an interpreter, the libraries in requirements/cpi.lock and the program. Everything is already compiled,
so the packaging script only copies files.

The interpreter is a copy of the running one, so VMs need the same architecture and the same or a newer glibc. The same
source tree, interpreter and lock file always produce the same bytes.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from hatch_build import KEEPER, build_keeper, semantic_version
from kubernetes_cpi import schema
from kubernetes_cpi.config import Config

Member: TypeAlias = tuple[str, bytes | str, int]
"""Name, content and mode of a file in a tarball. For a link, the content is its target as a string."""
ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
NAME: Final = "bosh-kubernetes-cpi"
JOB: Final = "kubernetes_cpi"
TEMPLATES: Final = {"cpi.erb": "bin/cpi", "cpi.json.erb": "config/cpi.json"}
OF_DEPLOYMENTS: Final[Mapping[str, dict[str, Any]]] = {
    "agent.mbus": {"description": "The message bus address. It is used if `kubernetes_cpi.agent.mbus` is empty."},
    "ntp": {"description": "The time servers. They are used if `kubernetes_cpi.agent.ntp` is empty."},
    "blobstore.provider": {
        "description": "The blobstore type (`local` in `bosh create-env`). "
        "It is used if `kubernetes_cpi.agent.blobstore` is empty."
    },
    "blobstore.path": {"description": "The local blobstore's directory in the VM."},
}
"""Properties that have the same names in every CPI's job. Deployment manifests such as bosh-deployment's set them.
"""


def main() -> int:
    return command("cpi-release", "Build a BOSH release with the CPI.", release)


def command(name: str, description: str, build: Callable[[str, Path], Path]) -> int:
    """Run ``./dev NAME``, which builds a release with the ``build`` function. Return the exit code."""
    parser = argparse.ArgumentParser(prog=f"./dev {name}", description=description)
    parser.add_argument(
        "--version", default=semantic_version(), help="version of the release (default: that of the project)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the tarball (default: dist)")
    arguments = parser.parse_args()
    try:
        made = build(arguments.version, arguments.out)
    except subprocess.CalledProcessError as exc:
        print(f"{name}: cannot build the release: {exc}", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"{name}: cannot build the release: {exc.strerror}: {exc.filename}", file=sys.stderr)
        return 1
    print(made)
    return 0


def release(version: str, out: Path) -> Path:
    """Build the release tarball in ``out`` and return its path."""
    return write(out, NAME, version, {JOB: job_files()}, lambda content: package_tree(content, JOB, "cpi.lock", JOB))


def write(
    out: Path, name: str, version: str, jobs: Mapping[str, Iterable[Member]], make_package: Callable[[Path], None]
) -> Path:
    """Build a release that contains ``jobs`` and one package, which has the name of the first job. Return the tarball's
    path.
    """
    job = next(iter(jobs))
    with tempfile.TemporaryDirectory() as scratch:
        content = Path(scratch)
        make_package(content)
        package = tarball(tree(content))
    packed = {each: tarball(files) for each, files in jobs.items()}
    of_jobs = [_entry(each, content) | {"packages": [job]} for each, content in packed.items()]
    of_package = _entry(job, package) | {"dependencies": []}
    manifest = {
        "name": name,
        "version": version,
        "commit_hash": _commit(),
        "uncommitted_changes": False,
        "jobs": of_jobs,
        "packages": [of_package],
    }
    whole = tarball(
        [
            ("release.MF", as_yaml(manifest), 0o644),
            *((f"jobs/{each}.tgz", content, 0o644) for each, content in packed.items()),
            (f"packages/{job}.tgz", package, 0o644),
            ("LICENSE", (ROOT / "LICENSE").read_bytes(), 0o644),
        ],
        level=0,
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{version}.tgz"
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(whole)
    beside.replace(path)
    return path


# --- the job ----------------------------------------------------------------------------------------------------------


def properties() -> dict[str, dict[str, Any]]:
    """Return the job's properties with their descriptions and defaults."""
    rows = {key: text for key, _, _, text in schema.rows(Config)}
    leaves = [key for key in rows if not any(other.startswith(f"{key}.") for other in rows)]
    found = {
        f"{JOB}.{key}": {"description": rows[key], "default": functools.reduce(getattr, key.split("."), Config())}
        for key in leaves
    }
    return {**found, **OF_DEPLOYMENTS}


def job_files() -> Iterator[Member]:
    return files_of_job(JOB, TEMPLATES, properties())


def files_of_job(
    name: str, templates: Mapping[str, str], known: Mapping[str, dict[str, Any]], package: str = ""
) -> Iterator[Member]:
    """Yield the files for a job without processes. The job uses the package named ``package``, by default the one with
    the job's own name.
    """
    where = HERE / "jobs" / name
    manifest = {"name": name, "templates": dict(templates), "packages": [package or name], "properties": dict(known)}
    yield "job.MF", as_yaml(manifest), 0o644
    yield "monit", b"", 0o644
    for template in templates:
        yield f"templates/{template}", (where / "templates" / template).read_bytes(), 0o644


# --- the package ------------------------------------------------------------------------------------------------------


def package_tree(target: Path, name: str, lock: str, program: str) -> None:
    """Create a package's files: ``packaging``, and ``python`` with the interpreter, a program and the libraries in
    a lock file.
    """
    shutil.copy(HERE / "packages" / name / "packaging", target / "packaging")
    python = target / "python"
    subprocess.run([sys.executable, ROOT / "stemcell_overlay/make/interpreter", python], check=True)
    shared = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
    # According to its build variables, Debian's interpreter needs the shared library. In fact the library is part of
    # the interpreter, so copy the file only if it exists.
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and shared.exists():
        shutil.copy(shared, python / "lib")
        _set_library_path(python / "bin", shared.parent)
    # Install the libraries alongside the standard library, because every Python build searches that directory, even if
    # the build has been moved.
    library = python / "lib" / Path(sysconfig.get_path("stdlib")).name
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pinned = ["--require-hashes", "--only-binary=:all:", "--requirement", str(ROOT / "requirements" / lock)]
    subprocess.run([*install, *pinned, "--target", str(library)], check=True, stdout=sys.stderr)
    shutil.copytree(ROOT / program, library / program, ignore=shutil.ignore_patterns("__pycache__"))
    if KEEPER.startswith(f"{program}/"):
        build_keeper(library / KEEPER)
    # Compile in a new process with a fixed hash seed, because the order of sets affects the compiled modules.
    compile_all = [
        str(python / "bin/python3"),
        "-B",
        "-m",
        "compileall",
        "-qf",
        "--invalidation-mode",
        "unchecked-hash",
    ]
    arguments = ["-s", str(target), str(library)]
    subprocess.run([*compile_all, *arguments], check=True, env={"PYTHONHASHSEED": "0"}, stdout=sys.stderr)


def _set_library_path(programs: Path, where: Path) -> None:
    """Change the library path of programs from the build's directory to ``../lib``, as chrpath does."""
    before, after = f"{where}\0".encode(), b"$ORIGIN/../lib\0"
    for path in programs.iterdir():
        content = path.read_bytes()
        if not path.is_symlink() and before in content:
            if len(before) < len(after):
                raise SystemExit(
                    f"cpi-release: cannot build the release: the interpreter has no room for another path than {where}"
                )
            path.write_bytes(content.replace(before, after.ljust(len(before), b"\0")))


def tree(top: Path) -> Iterator[tuple[str, bytes | str, int]]:
    """Yield the name, content and mode of each file below a directory, sorted by name. For a link, the content is its
    target as a string.
    """
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if path.is_symlink():
            yield name, str(path.readlink()), 0o777
        elif path.is_file():
            yield name, path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644


# --- formats ----------------------------------------------------------------------------------------------------------


def tarball(files: Iterable[tuple[str, bytes | str, int]], level: int = 6) -> bytes:
    """Return a gzipped tarball. The same files always produce the same bytes."""
    target = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=target, mode="wb", compresslevel=level, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for name, content, mode in files:
            member = tarfile.TarInfo(f"./{name}")
            member.mode = mode
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """Return the manifest entry for a job or package. The digest of its content is also its version and fingerprint."""
    digest = hashlib.sha256(content).hexdigest()
    return {"name": name, "version": digest, "fingerprint": digest, "sha1": f"sha256:{digest}"}


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def as_yaml(document: dict[str, Any]) -> bytes:
    """Return the document as JSON, which is valid YAML."""
    return (json.dumps(document, indent=1) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main())
