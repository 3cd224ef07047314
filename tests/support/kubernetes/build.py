"""Builds Kubernetes from Debian's source package, which contains all dependencies, so nothing else is downloaded.

Only bookworm's package contains the dependencies. Later packages are built against the distribution's libraries.
bookworm's Kubernetes is an old version without security support, which is acceptable for tests on one machine but never
for production.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent_shim.core.errors import ShimError

SUITE: Final = "bookworm"
PROGRAMS: Final = ("kubelet", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
KEYS: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
TAGS: Final = "providerless,dockerless"
"""Build tags that leave out the cloud providers and the Docker runtime, which halves the build time."""


@dataclass(frozen=True)
class DebianSource:
    """A source package's entry in Debian's signed index. ``digest`` is the digest of the package's .dsc file."""

    version: str
    digest: str

    @property
    def upstream(self) -> str:
        """The Kubernetes version: ``1.20.5+really1.20.2-1.1+deb12u1`` is 1.20.2."""
        found = re.match(r"(?:.*really)?(\d+\.\d+\.\d+)", self.version)
        assert found is not None, self.version
        return found[1]


def cached(cache: Path) -> Path:
    """Return the directory with the four programs, building them only if the cache has none for this source version,
    compiler and set of flags.

    Needs golang-go, dpkg-dev, jq, rsync and make. Raises ``ShimError`` if one of them is not available.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as scratch:
        apt = _Apt(Path(scratch))
        source = apt.source("kubernetes")
        compiler = _run(["go", "version"]).strip()
        # Hash only the build recipe. Otherwise, any changed import in this module would trigger a build, which takes
        # half an hour.
        recipe = f"{inspect.getsource(_build)} {PROGRAMS} {TAGS}"
        parts = {"source": f"{source.version} {source.digest}", "compiler": compiler, "recipe": recipe}
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        place = cache / f"kubernetes-{key}"
        print(f"kubernetes: {place.name}, of {source.version} (sha256 {source.digest}), {compiler}", flush=True)
        if not place.is_dir():
            began = time.monotonic()
            print("kubernetes: building, which takes about half an hour", flush=True)
            built = _build(apt.unpacked("kubernetes"), source, Path(scratch))
            built.rename(place)
            print(f"kubernetes: built in {time.monotonic() - began:.0f} s", flush=True)
    return place


def _build(tree: Path, source: DebianSource, scratch: Path) -> Path:
    major, minor, _ = source.upstream.split(".")
    version = scratch / "version"
    said = {
        "KUBE_GIT_VERSION": f"v{source.upstream}",
        "KUBE_GIT_MAJOR": major,
        "KUBE_GIT_MINOR": minor,
        "KUBE_GIT_COMMIT": "debian",
        "KUBE_GIT_TREE_STATE": "archive",
    }
    version.write_text("".join(f"{name}='{value}'\n" for name, value in said.items()))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(scratch),
        "GOPROXY": "off",
        "GOFLAGS": f"-tags={TAGS}",
        "CGO_ENABLED": "0",
        "KUBE_GIT_VERSION_FILE": str(version),
    }
    log = scratch / "build.log"
    wanted = " ".join(f"cmd/{program}" for program in PROGRAMS)
    with log.open("wb") as output:
        make = ["make", "-C", str(tree), f"WHAT={wanted}"]
        done = subprocess.run(make, stdout=output, stderr=subprocess.STDOUT, env=environment)
    if done.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise ShimError(f"cannot build kubernetes: make ended with {done.returncode}:\n{end}")
    built = scratch / "built"
    built.mkdir()
    for program in PROGRAMS:
        shutil.move(tree / "_output/bin" / program, built)
    return built


class _Apt:
    """Runs apt with this machine's sources and with source packages enabled.

    The machine's own package lists do not change.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        sources, lists = scratch / "sources", scratch / "lists/partial"
        for directory in (sources, lists, scratch / "archives/partial"):
            directory.mkdir(parents=True)
        (sources / "debian.sources").write_text(_debian())
        config = scratch / "apt.conf"
        config.write_text(
            f'Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "{sources}";\n'
            f'Dir::State::lists "{lists.parent}"; Dir::Cache "{scratch}"; APT::Sandbox::User "root";\n'
        )
        self._environment = {**os.environ, "APT_CONFIG": str(config)}
        _run(["apt-get", "update", "-qq"], env=self._environment)

    def source(self, package: str) -> DebianSource:
        """Return the version and digest of the source package that apt would download."""
        said = _run(["apt-get", "source", "--print-uris", "-qq", package], env=self._environment)
        found = re.search(rf" {package}_(\S+)\.dsc \d+ SHA256:([0-9a-f]{{64}})", said)
        if found is None:
            raise ShimError(f"cannot build {package}: no source package of that name in {SUITE}")
        return DebianSource(found[1], found[2])

    def unpacked(self, package: str) -> Path:
        """Download a package's source, verify the digests, apply Debian's patches, and return the directory."""
        _run(["apt-get", "source", "-qq", package], env=self._environment, cwd=self._scratch)
        (tree,) = (path for path in self._scratch.glob(f"{package}-*") if path.is_dir())
        return tree


def _debian() -> str:
    """Return an apt source entry for source packages, with the mirror from which this machine gets Debian packages."""
    said = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"])
    if not said.strip():
        raise ShimError("cannot build kubernetes: apt knows no packages of Debian here; apt-get update may help")
    fields = {"Types": "deb-src", "URIs": said.split()[0], "Suites": SUITE, "Components": "main", "Signed-By": KEYS}
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def _run(argv: list[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=cwd)
    except FileNotFoundError:
        raise ShimError(f"cannot run {argv[0]}: it is not installed") from None
    if done.returncode != 0:
        raise ShimError(f"cannot run {' '.join(argv)}: {done.stderr.strip() or f'it ended with {done.returncode}'}")
    return done.stdout
