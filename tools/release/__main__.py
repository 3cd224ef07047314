"""``./dev release`` builds everything that a release publishes, in ``dist/agent-shim-VERSION``.

    ./dev release [--tag TAG] [--name REGISTRY/NAME] [--image ARCHITECTURE=BASE]... [--only PART]... [--out DIRECTORY]
    ./dev release --compare DIRECTORY DIRECTORY

Parts are wheel, cpi, images, stemcells, sboms and notes. Checksums and sizes are always written at the end.

To build for an architecture other than this machine's, images need an emulator (qemu-user-static and binfmt-support),
and wheels need a cross compiler (gcc-aarch64-linux-gnu, or ziglang from PyPI). SOURCE_DATE_EPOCH is the time of the
last commit unless it is set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hatch_build import revision, semantic_version
from stemcell_overlay.stemcell import BASES, NO_EMULATOR, OWN, is_emulated
from tools.release import texts

ROOT: Final = Path(__file__).parents[2]
STEMCELL: Final = ROOT / "stemcell_overlay/stemcell.py"
LOCKS: Final = {"agent-shim": "runtime", "bosh-kubernetes-cpi": "cpi"}


@dataclass(frozen=True)
class Release:
    """The inputs of a release, with a method to build each of its parts."""

    version: str
    out: Path
    bases: dict[str, str]
    name: str
    """Name of the image in a registry, to which the light stemcell refers. If empty, no light stemcell is built."""
    build: list[str]
    epoch: str

    def wheel(self) -> None:
        """Build the source distribution, and a wheel for each architecture. Wheels contain the compiled keeper."""
        build = (sys.executable, "-m", "hatchling", "build", "-d", str(self.out), "-t")
        self._run(*build, "sdist")
        for machine, architecture in OWN.items():
            if architecture in self.bases:
                self._run(*build, "wheel", AGENT_SHIM_MACHINE=machine)

    def cpi(self) -> None:
        """Build the Kubernetes CPI's BOSH release."""
        self._run(sys.executable, "-m", "tools.cpi_release.release", "--out", str(self.out))

    def images(self) -> None:
        """Build an image for each architecture and save it as an OCI archive, which `skopeo copy` can push without
        changing the digest.
        """
        for architecture, base in self.bases.items():
            given = [f"--platform=linux/{architecture}", f"--build-arg=BASE_IMAGE={base}", f"--timestamp={self.epoch}"]
            named = {"STEMCELL_VERSION": self.version, "VERSION": self.version, "REVISION": revision()}
            named["CREATED"] = datetime.fromtimestamp(int(self.epoch), UTC).isoformat()
            version = [f"--build-arg={name}={value}" for name, value in named.items()]
            self._run(
                "podman", "build", "--quiet", *given, *version, *self.build, "--tag", tag(architecture), str(ROOT)
            )
            archive = self.archive(architecture)
            saved = archive.with_suffix(".part")
            saved.unlink(missing_ok=True)
            self._run("podman", "save", "--quiet", "--format=oci-archive", f"--output={saved}", tag(architecture))
            repack(saved, archive, int(self.epoch))
            saved.unlink()

    def stemcells(self) -> None:
        """Build the full stemcell from the amd64 image, and the light stemcell, which refers to this image in a
        registry.
        """
        image = tag("amd64")
        program = [sys.executable, str(STEMCELL), "--version", self.version, "--out", str(self.out)]
        self._run(*program, "--image", image)
        if self.name:
            system = self._output("podman", "run", "--rm", "--network=none", image, "sh", "-c", SYSTEM).strip()
            reference = f"{self.name}:{self.version}@{manifest_digest(self.archive('amd64'))}"
            self._run(*program, "--light", "--os", system, "--image", reference)

    def sboms(self) -> None:
        """Write CycloneDX SBOMs for the wheel, the CPI and each image."""
        listing = [sys.executable, str(ROOT / "stemcell_overlay/sbom.py")]
        for name, lock in LOCKS.items():
            text = self._output(*listing, "--name", name, "--lock", str(ROOT / f"requirements/{lock}.lock"))
            (self.out / f"{name}-{self.version}.cdx.json").write_text(text)
        for architecture in self.bases:
            program = [sys.executable, str(STEMCELL), "--sbom", "--version", self.version]
            text = self._output(*program, "--image", tag(architecture))
            self.archive(architecture).with_suffix(".cdx.json").write_text(text)

    def notes(self) -> None:
        """Write this version's release notes."""
        text = texts.notes((ROOT / "CHANGELOG.md").read_text(), self.version)
        (self.out / f"agent-shim-{self.version}-notes.md").write_text(text)

    def archive(self, architecture: str) -> Path:
        """Return the path of the image archive for an architecture."""
        return self.out / f"agent-shim-{self.version}-linux-{architecture}.tar"

    def _run(self, *command: str, **environment: str) -> None:
        given = {**self._environment(), **environment}
        subprocess.run(command, check=True, stdout=sys.stderr, env=given, cwd=ROOT)

    def _output(self, *command: str) -> str:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=self._environment(), cwd=ROOT)
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SOURCE_DATE_EPOCH": self.epoch, "PYTHONHASHSEED": "0", "TZ": "UTC"}


SYSTEM: Final = '. /etc/os-release; echo "$ID-$VERSION_CODENAME"'
PARTS: Final = {
    "wheel": Release.wheel,
    "cpi": Release.cpi,
    "images": Release.images,
    "stemcells": Release.stemcells,
    "sboms": Release.sboms,
    "notes": Release.notes,
}


def tag(architecture: str) -> str:
    """Return the local name of the image for an architecture."""
    return f"localhost/agent-shim/release-{architecture}"


def repack(source: Path, target: Path, epoch: int) -> None:
    """Copy a tarball with its members sorted and their mtimes set to ``epoch``, because `podman save` uses the current
    time.
    """
    with tarfile.open(source) as old, tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            member.mtime = epoch
            new.addfile(member, old.extractfile(member) if member.isreg() else None)


def manifest_digest(archive: Path) -> str:
    """Return the digest of the image's manifest, by which a registry identifies the image."""
    with tarfile.open(archive) as packed:
        index = packed.extractfile("index.json")
        assert index is not None
        return str(json.load(index)["manifests"][0]["digest"])


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.compare:
        before, after = ((path / texts.SUMS).read_text() for path in arguments.compare)
        found = texts.differing(before, after)
        sys.stdout.writelines(f"{name}: {how}\n" for name, how in found.items())
        return 1 if found else 0
    version = semantic_version()
    if arguments.tag and (arguments.tag != f"v{version}" or revision().endswith("-dirty")):
        print(f"release: cannot make {arguments.tag}: this tree is {version} ({revision()})", file=sys.stderr)
        return 1
    epoch = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        release = Release(
            version=version,
            out=(arguments.out or ROOT / "dist" / f"agent-shim-{version}").resolve(),
            bases=dict(one.split("=", 1) for one in arguments.image) or BASES,
            name=arguments.name,
            build=[*(["--no-cache"] if arguments.no_cache else []), *arguments.build],
            epoch=os.environ.get("SOURCE_DATE_EPOCH")
            or subprocess.run(epoch, check=True, capture_output=True, text=True).stdout.strip(),
        )
        return make(release, arguments.only or list(PARTS))
    except (OSError, ValueError, subprocess.CalledProcessError) as exc:
        print(f"release: cannot make the release: {exc}", file=sys.stderr)
        return 1


def make(release: Release, parts: list[str]) -> int:
    """Build ``parts`` of a release and their checksums, and print the sizes. Return the exit code."""
    if {"images", "stemcells"} & set(parts) and shutil.which("podman") is None:
        print("release: cannot make images: podman is not installed; apt-get install podman", file=sys.stderr)
        return 69
    foreign = set(release.bases) - {OWN.get(platform.machine(), "")}
    missing = sorted(architecture for architecture in foreign if not is_emulated(architecture))
    if "images" in parts and missing:
        print(
            f"release: cannot make images for {', '.join(missing)}: {NO_EMULATOR}, or name the others with --image",
            file=sys.stderr,
        )
        return 69
    release.out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if part in parts:
            PARTS[part](release)
    (release.out / texts.SUMS).write_text(texts.sums(release.out))
    sys.stdout.write(texts.sizes(release.out))
    if "stemcells" in parts and not release.name:
        print("release: no light stemcell: --name is missing", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./dev release", description="Make everything that a release publishes.")
    parser.add_argument("--tag", default="", help="fail unless this tree is clean and has the version of this tag")
    parser.add_argument("--name", default="", help="name of the image in a registry, for the light stemcell")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="ARCHITECTURE=BASE",
        help=f"an image and its base (default: {' and '.join(f'{one}={base}' for one, base in BASES.items())})",
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="make only this part")
    parser.add_argument("--no-cache", action="store_true", help="build images without the layers of earlier builds")
    parser.add_argument("--out", type=Path, help="output directory (default: dist/agent-shim-VERSION)")
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar="DIRECTORY",
        help="only list the files that differ between two releases",
    )
    parser.add_argument("build", nargs="*", metavar="BUILD OPTION", help="options for the image builds, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
