"""``bosh-agent compile``: compile releases without a Director, in a container created from their stemcell.

Flags, lines on standard error, the exit code and the name of the result match those of the Go agent (main/compile.go,
releasetarball/compile.go, stemcellmetadata/slug_linux.go). There are four differences. This command has a ``-b`` flag.
Packages that jobs use stay installed. A running agent is not disturbed. At the end, the sources and the packages' blobs
are removed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent_shim.actions.compilation import Compilation
from agent_shim.actions.compile import packages_of_jobs
from agent_shim.bulk.protocol import BlobRef
from agent_shim.cli import release_tarball
from agent_shim.cli.release_tarball import CompiledPackage, ReleaseManifest, SourcePackage
from agent_shim.core import os_release, safetext
from agent_shim.core.errors import ConfigError, ShimError, errors_as
from agent_shim.core.paths import VCAP, Paths
from agent_shim.core.settings import Blobstore
from agent_shim.daemon import boot
from agent_shim.host import files, process, reaper
from agent_shim.services.bundles import Bundle, Bundles
from agent_shim.services.compiler import Compiler, Package
from agent_shim.services.spec_store import SpecStore
from agent_shim.services.volume_lease import exclusive_agent
from agent_shim.supervisor.ownership.keepers import Keepers

FAILED: Final = 1
INTERRUPTED: Final = 128 + signal.SIGINT

_LONG_FLAG: Final = re.compile(r"^-(?=[a-z]{2})")
"""Matches the single dash of a flag such as ``-output-directory``. Go's ``flag`` package accepts one dash or two."""

DEFAULT_OUTPUT: Final = Path("/tmp")  # noqa: S108 - the Go agent's default; files are created there with random names and then renamed


def main(argv: Sequence[str]) -> int:
    """Compile releases. Return 0 if all are compiled, 1 after the first failure, and 130 after SIGINT or SIGTERM. Exit
    with 2 for invalid flags.

    In all cases, compilation processes are terminated and unpacked files are removed.
    """
    args = parser().parse_args([_LONG_FLAG.sub("--", word) for word in argv])
    paths = Paths(args.base.absolute())
    process.default_signals()
    process.disable_core_dumps()
    # Make SIGTERM act like SIGINT: within an event loop it cancels the task, elsewhere it raises KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    date = time.strftime("%Y/%m/%d %H:%M:%S ")  # only the first line has a date, as in the Go agent
    try:
        args.output_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        stemcell = stemcell_slug(paths)
        _log(f"{date}Compiling with stemcell {stemcell}")
        date = ""
        _compile_all(args.tarballs, args.output_directory, stemcell, paths)
    except (ShimError, OSError) as exc:
        _log(f"{date}{exc}")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``bosh-agent compile``. It expects long flags with two dashes, so ``main`` adds the second
    dash to flags such as ``-output-directory``.
    """
    parser = argparse.ArgumentParser(
        prog="bosh-agent compile",
        description="Compile the packages of BOSH releases for the stemcell of this container, without a Director.",
        epilog="examples:\n"
        "  bosh-agent compile nginx-1.2.tgz\n"
        "  bosh-agent compile -output-directory=/out /in/nginx-1.2.tgz /in/bpm-1.4.tgz\n\n"
        "The result is DIR/NAME-VERSION-OS-CODENAME-STEMCELL_VERSION.tgz, a tarball for `bosh upload-release`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = f"directory for compiled releases, created with mode 0700 if missing (default: {DEFAULT_OUTPUT})"
    parser.add_argument("--output-directory", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help=text)
    text = "root directory instead of /var/vcap"
    parser.add_argument("-b", dest="base", type=Path, default=VCAP, metavar="DIR", help=text)
    parser.add_argument("tarballs", nargs="+", type=Path, metavar="TARBALL", help="release with sources, .tgz or .tar")
    return parser


def _compile_all(tarballs: Sequence[Path], output: Path, stemcell: str, paths: Paths) -> None:
    """Compile releases one after another. If an agent is running, raise ``AlreadyRunningError``."""
    with exclusive_agent(paths, "compile"):
        boot.make_tree(paths)
        bundles = Bundles(paths)
        compiler = Compiler(paths, process.script_environment(os.environ), Keepers(paths))
        # If an agent has deployed jobs here before, their packages must stay installed.
        in_use = packages_of_jobs(asyncio.run(SpecStore(paths).load()), bundles)
        store = Blobstore("local", {"blobstore_path": str(paths.blobs)})
        compilation = Compilation(bundles, compiler, store, in_use)
        for tarball in tarballs:
            release = _ReleaseCompilation(tarball, output, stemcell, paths, compilation)
            try:
                result = release.compile()
            finally:
                release.remove_blobs()
            _log(f"Finished archiving compiled tarball {result}")


@dataclass(slots=True)
class _ReleaseCompilation:
    """The compilation of one release. For each package, ``_sources`` contains the blob with its source, ``_results``
    the blob with the compiled package, and ``_compiled`` its entry in the new release.MF. The blobs are in
    ``data/blobs``.
    """

    tarball: Path
    output: Path
    stemcell: str
    paths: Paths
    compilation: Compilation
    _sources: dict[str, Path] = field(default_factory=dict)
    _compiled: dict[str, CompiledPackage] = field(default_factory=dict)
    _results: dict[str, Path] = field(default_factory=dict)

    def compile(self) -> Path:
        """Compile the release's packages, and return the path of the compiled release. Raises ``ActionError``."""
        manifest = self._read()
        self._extract(manifest)
        _log("Starting packages compilation")
        begun_at = time.monotonic()
        asyncio.run(self._compile_packages(manifest.packages))
        _log(f"Finished packages compilation after {duration(time.monotonic() - begun_at)}")
        _log(f"Archiving compiled BOSH Release {manifest.name}/{manifest.version} with stemcell {self.stemcell}")
        return self._write(manifest)

    def remove_blobs(self) -> None:
        """Remove this release's blobs (sources and compiled packages) from ``data/blobs``."""
        for path in [*self._sources.values(), *self._results.values()]:
            files.remove_tree(path)

    def _read(self) -> ReleaseManifest:
        """Return the release's manifest, after checking that its packages can be ordered. Raises ``ActionError``."""
        _log(f"Reading BOSH Release Manifest from tarball {self.tarball}")
        with errors_as("failed to parse release manifest", ShimError, OSError):
            manifest = release_tarball.read_manifest(self.tarball)
            release_tarball.in_order(manifest.packages)
        _log(f"Release {manifest.name}/{manifest.version} has {len(manifest.packages)} packages")
        return manifest

    def _extract(self, manifest: ReleaseManifest) -> None:
        _log("Extracting packages")
        with errors_as("failed to extract packages from tarball", ShimError, OSError):
            for name, path in release_tarball.extract_packages(self.tarball, manifest, self.paths.blobs):
                self._sources[name] = path
                _log(f"Copying package {name} to {path}")

    async def _compile_packages(self, packages: Sequence[SourcePackage]) -> None:
        """Compile each package after its dependencies. At the end, remove the packages that were installed for
        compiling.
        """
        with reaper.reaping():  # needed if this process is PID 1 in a container
            try:
                for package in release_tarball.in_order(packages):
                    with errors_as(f"failed to compile package {package.name}/{package.version}", ShimError, OSError):
                        await self._compile(package)
            finally:
                await self.compilation.clean()

    async def _compile(self, package: SourcePackage) -> None:
        """Compile a package. Its dependencies must have been compiled before."""
        _log(f"Compiling package {package.name}/{package.version}")
        source = BlobRef(self._sources[package.name].name, digest=package.sha1)
        needed = [self._bundle(name) for name in dict.fromkeys(package.dependencies)]
        wanted = Package(package.name, package.version, source)
        done = await self.compilation.compile(wanted, needed, report=lambda _: None)  # steps are not logged
        self._results[package.name] = self.paths.blobs / done.blob_id
        identity = package.name, package.version, package.fingerprint
        self._compiled[package.name] = CompiledPackage(*identity, done.sha1, self.stemcell, package.dependencies)
        _log(f"Finished compiling release {package.name}/{package.version} BlobstoreID={done.blob_id}")

    def _bundle(self, name: str) -> Bundle:
        """Return a compiled package as a bundle, so that it can be installed as a dependency."""
        package = self._compiled[name]
        return Bundle("package", name, package.version, BlobRef(self._results[name].name, digest=package.sha1))

    def _write(self, manifest: ReleaseManifest) -> Path:
        """Write the compiled release and return its path."""
        path = self.output / f"{manifest.name}-{manifest.version}-{self.stemcell.replace('/', '-')}.tgz"
        changed = release_tarball.compiled_manifest(manifest, list(self._compiled.values()))
        with errors_as(f"failed to write {path}", ShimError, OSError):
            release_tarball.write_compiled(self.tarball, path, changed, self._results)
        return path


def stemcell_slug(paths: Paths) -> str:
    """Return ``OS-CODENAME/VERSION`` of this container's stemcell. Raises ``ConfigError``."""
    version_file, release_file = paths.bosh_etc / "stemcell_version", paths.etc / "os-release"
    texts: list[str] = []
    for file in (version_file, release_file):
        try:
            texts.append(file.read_text())
        except (OSError, UnicodeDecodeError) as exc:
            why = getattr(exc, "strerror", None) or exc
            hint = "(compile in a container of the stemcell's image)"
            raise ConfigError(f"cannot tell the stemcell: {file}: {why} {hint}") from exc
    version, release = texts[0].strip(), texts[1]
    try:
        slug = f"{os_release.operating_system(release)}/{version}"
    except ValueError as exc:
        raise ConfigError(f"cannot tell the stemcell from {release_file}: {exc}") from exc
    if not version or slug.count("/") != 1 or not slug.isprintable():
        raise ConfigError(f"cannot tell the stemcell: {version_file} has no valid version (printable, without a slash)")
    return slug


def duration(seconds: float) -> str:
    """Format a duration in Go's format: ``12.5ms``, ``1.25s``, ``2m3.5s``, ``1h0m3.5s``. ``seconds`` must be at least
    0.001, because Go uses smaller units below that.
    """
    if seconds < 1:
        return f"{_plain(seconds * 1000)}ms"
    whole, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(whole), 60)
    text = f"{_plain(rest)}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text


def _plain(number: float) -> str:
    """Format a number with up to six decimals, without trailing zeros."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def _log(text: str) -> None:
    print(safetext.lines(text), file=sys.stderr, flush=True)
