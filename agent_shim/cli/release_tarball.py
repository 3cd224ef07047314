"""Reads BOSH source release tarballs, and writes the corresponding compiled release tarballs.

The fields of release.MF, the order of packages and the layout of the result match those of the Go agent
(releasetarball/compile.go, bosh-cli release/manifest/manifest.go). Unlike with the Go agent, all entries are owned by
root, and a release that cannot be compiled is rejected before anything is compiled. In the source tarball, names need
not begin with ``./``, and the entry for the ``packages`` directory may be missing. Only short-lived processes import
this module.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import yaml

from agent_shim.bulk import archive, packing
from agent_shim.cli import yaml_errors
from agent_shim.core.digest import MultipleDigest
from agent_shim.core.errors import ArchiveError, ConfigError, DigestError
from agent_shim.host import files
from agent_shim.services.bundles import checked_name

MANIFEST: Final = "release.MF"
PACKAGES: Final = "packages"
COMPILED: Final = "compiled_packages"

FILE_MODE: Final = 0o644
DIRECTORY_MODE: Final = 0o755
MAX_MANIFEST_BYTES: Final = 16 * 1024 * 1024


class _ReleasePart(msgspec.Struct, frozen=True):
    """Fields that every part listed in release.MF has. ``sha1`` is the digest string of the part's tarball."""

    name: str = ""
    version: str = ""
    fingerprint: str = ""
    sha1: str = ""


class JobPart(_ReleasePart, frozen=True):
    """A job in release.MF."""

    packages: list[str] = []


class SourcePackage(_ReleasePart, frozen=True):
    """A package in release.MF. ``dependencies`` are package names."""

    dependencies: list[str] = []


class CompiledPackage(_ReleasePart, frozen=True):
    """A compiled package in release.MF. ``stemcell`` is ``OS-CODENAME/VERSION``."""

    stemcell: str = ""
    dependencies: list[str] = []


class License(msgspec.Struct, frozen=True):
    """The license in release.MF."""

    version: str = ""
    fingerprint: str = ""
    sha1: str = ""


class ReleaseManifest(msgspec.Struct, frozen=True):
    """release.MF. The fields are in the order in which they are written to the file."""

    name: str = ""
    version: str = ""
    commit_hash: str = ""
    uncommitted_changes: bool = False
    jobs: list[JobPart] = []
    packages: list[SourcePackage] = []
    compiled_packages: list[CompiledPackage] = []
    license: License | None = None
    no_compression: bool = False


class _TextLoader(yaml.BaseLoader):
    """A YAML loader that reads every scalar except null as text, because the version ``1.10`` must not become a
    number.
    """


_NULL: Final = "tag:yaml.org,2002:null"
_TextLoader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_TextLoader.add_constructor(_NULL, lambda *_: None)


class _QuotingDumper(yaml.SafeDumper):
    """A YAML dumper that also quotes strings that YAML 1.2 would read as numbers, such as the digest ``12e34``."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - required by PyYAML
        super().increase_indent(flow, False)  # also indent a list below its key


_FLOAT: Final = re.compile(r"[-+]?[0-9][0-9_,]*(?:\.[0-9_,]*)?(?:[eE][-+]?[0-9]+)?$")
_QuotingDumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


# --- reading ----------------------------------------------------------------------------------------------------------


def read_manifest(tarball: Path) -> ReleaseManifest:
    """Return the manifest of a source release. Raises ``ActionError`` (``ArchiveError`` for an invalid tarball) or
    ``ConfigError``.
    """
    with _opened(tarball) as source:
        for member, path, data in archive.entries(source):
            if path == MANIFEST:
                if member.size > MAX_MANIFEST_BYTES:
                    raise ConfigError(f"cannot read {MANIFEST}: it has more than {MAX_MANIFEST_BYTES} bytes")
                return _checked(parse_manifest(b"".join(data)))
    raise ArchiveError(f"failed to find {MANIFEST} in tarball")


def parse_manifest(raw: bytes) -> ReleaseManifest:
    """Read release.MF. Raises ``ConfigError``."""
    try:
        document = yaml.load(raw, Loader=_TextLoader)  # noqa: S506 - creates only strings, lists and mappings
        return msgspec.convert(_without_nulls({} if document is None else document), ReleaseManifest, strict=False)
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError, RecursionError) as exc:
        raise ConfigError(f"cannot read {MANIFEST}: {yaml_errors.in_a_line(exc)}") from exc


def _without_nulls(value: Any) -> Any:
    """Drop keys without a value at every level, so that their fields get the defaults."""
    if isinstance(value, dict):
        return {key: _without_nulls(member) for key, member in value.items() if member is not None}
    return [_without_nulls(member) for member in value] if isinstance(value, list) else value


def _checked(manifest: ReleaseManifest) -> ReleaseManifest:
    """Return the manifest unchanged. Raises ``ConfigError`` if the release is compiled already, and ``ActionError`` if
    one of its names cannot be used as a file name, for example ``../x``.
    """
    checked_name("release", manifest.name)
    checked_name("release with the version", manifest.version)
    for package in manifest.packages:
        checked_name("package", package.name)
    if manifest.compiled_packages:
        stemcell = manifest.compiled_packages[0].stemcell
        raise ConfigError(f"the release is compiled already, for {stemcell} (give the tarball with its sources)")
    return manifest


def in_order(packages: Sequence[SourcePackage]) -> list[SourcePackage]:
    """Order packages after their dependencies, and otherwise by name. Raises ``ConfigError`` for a cycle or an unknown
    name.
    """
    by_name = {package.name: package for package in packages}
    done: dict[str, SourcePackage] = {}

    def add(name: str, dependents: tuple[str, ...]) -> None:
        """Append a package to ``done``, after its dependencies. ``dependents`` is the chain of packages that led to
        this one. A package that depends on a member of its own chain is part of a cycle.
        """
        for needed in by_name[name].dependencies if name not in done else ():
            if needed not in by_name:
                raise ConfigError(f"package {name} depends on {needed}, which is not in {MANIFEST}")
            if needed in (*dependents, name):
                raise ConfigError(f"cycle detected: package {name} depends on {needed}, which depends on it")
            add(needed, (*dependents, name))
        done.setdefault(name, by_name[name])

    for name in sorted(by_name):
        add(name, ())
    return list(done.values())


def extract_packages(tarball: Path, manifest: ReleaseManifest, directory: Path) -> Iterator[tuple[str, Path]]:
    """Copy the tarball of each package in ``manifest`` to ``directory/NAME.tgz``. Yields the package's name and the
    path of the copy, as soon as it has been copied.

    Raises ``ArchiveError`` if a package is not listed in the manifest or, at the end, if a listed package is missing.
    Raises ``DigestError`` if the digest of a package is wrong.
    """
    digests = {package.name: package.sha1 for package in manifest.packages}
    seen: set[str] = set()
    with _opened(tarball) as source:
        for member, path, data in archive.entries(source):
            name = path.removeprefix(f"{PACKAGES}/").removesuffix(".tgz")
            if member.type not in archive.REGULAR or path != f"{PACKAGES}/{name}.tgz" or "/" in name:
                continue
            if name not in digests:
                raise ArchiveError(f"package not found in release manifest: {path}")
            target = directory / f"{name}.tgz"
            try:
                _copy_checked(data, target, MultipleDigest.parse(digests[name]))
            except DigestError as exc:
                raise DigestError(f"{path}: {exc}") from exc
            seen.add(name)
            yield name, target
    if missing := sorted(digests.keys() - seen):
        raise ArchiveError(f"{PACKAGES}/{missing[0]}.tgz is not in the tarball")


def _copy_checked(data: Iterator[bytes], target: Path, digest: MultipleDigest) -> None:
    """Write ``data`` to ``target``. If its digest is wrong, raise ``DigestError`` and leave ``target`` as it was."""
    hasher = digest.hasher()
    with files.replacing(target, mode=FILE_MODE) as out:
        for piece in data:
            out.write(piece)
            hasher.update(piece)
        digest.check(hasher)


def _opened(tarball: Path) -> BinaryIO:
    """Open a tarball. Raises ``HostError``."""
    try:
        return tarball.open("rb")
    except OSError as exc:
        raise files.failed(f"open {tarball}", exc) from exc


# --- writing ----------------------------------------------------------------------------------------------------------


def compiled_manifest(source: ReleaseManifest, packages: list[CompiledPackage]) -> ReleaseManifest:
    """Return ``source`` with compiled packages instead of sources."""
    return msgspec.structs.replace(source, packages=[], compiled_packages=packages)


def render_manifest(manifest: ReleaseManifest) -> bytes:
    """Return release.MF as YAML. Empty lists of jobs and packages, and a missing license, are left out."""
    optional = ("jobs", "packages", "compiled_packages", "license")
    document = {name: value for name, value in msgspec.to_builtins(manifest).items() if value or name not in optional}
    text: str = yaml.dump(document, Dumper=_QuotingDumper, sort_keys=False, allow_unicode=True)
    return text.encode()


def write_compiled(tarball: Path, into: Path, manifest: ReleaseManifest, packages: Mapping[str, Path]) -> None:
    """Write the release ``tarball`` to ``into``, with ``manifest`` as release.MF and the compiled ``packages`` in the
    given order.

    Entries keep their order, and compiled packages replace the sources. ``into`` is either complete or does not exist.
    """
    with (
        _opened(tarball) as source,
        files.replacing(into, mode=FILE_MODE) as out,
        packing.Sink(out, compressed=not manifest.no_compression, newest=None) as sink,
    ):  # without a limit on modification times, because ``_header`` leaves them out
        are_written = False
        for member, path, data in archive.entries(source):
            is_of_packages = path == PACKAGES or path.startswith(f"{PACKAGES}/")
            if path == MANIFEST:
                content = render_manifest(manifest)
                sink.write_member(_header(path, size=len(content)), [content])
            elif not is_of_packages and path:  # the path of the top directory is ""
                sink.write_member(_header(path, member), data)
            if is_of_packages and not are_written:
                _write_packages(sink, packages)
                are_written = True
        sink.finish()


def _write_packages(sink: packing.Sink, packages: Mapping[str, Path]) -> None:
    """Write the directory of compiled packages. ``packages`` maps their names to their tarballs."""
    directory = _header(COMPILED)
    directory.type, directory.mode = tarfile.DIRTYPE, DIRECTORY_MODE
    sink.write_header(directory)
    for name, path in packages.items():
        with path.open("rb") as file:
            header = _header(f"{COMPILED}/{name}.tgz", size=file.seek(0, 2))
            file.seek(0)
            sink.write_member(header, iter(partial(file.read, files.CHUNK_BYTES), b""))


def _header(path: str, member: tarfile.TarInfo | None = None, *, size: int = 0) -> tarfile.TarInfo:
    """Return a tar header for ``member``, an entry of the source release. If ``member`` is None, the header describes a
    new file of ``size`` bytes.

    The owner is root and there is no modification time, so that the same sources produce the same bytes.
    """
    header = tarfile.TarInfo(f"./{path}")
    header.size, header.mode = size, FILE_MODE
    header.uname = header.gname = "root"
    if member is not None:
        header.type = member.type
        if member.isdir():
            header.mode = member.mode & 0o7777
        elif member.issym():
            header.linkname = member.linkname
        elif member.type in archive.REGULAR:
            header.size = member.size
        else:
            raise ArchiveError(f"{path}: it is neither file, directory nor symbolic link")
    return header
