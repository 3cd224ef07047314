"""``./dev stemcell`` builds a stemcell for Directors with container CPIs.

    ./dev stemcell [--image REF | --base REF] [--arch ARCH] [--version V] [--out DIR] [-- BUILD OPTION…]
    ./dev stemcell --light --image REF@sha256:… [--arch ARCH] [--version V] [--out DIR]
    ./dev stemcell --sbom --image REF [--version V]

The image either already exists (``--image``) or is built with the Dockerfile on top of ``--base``, with the options
after ``--``. A light stemcell contains only the name of an image in a registry. ``--sbom`` prints the components of an
image in CycloneDX. A build for an architecture other than this machine's needs an emulator (qemu-user-static and
binfmt-support).

The format is that of bosh-linux-stemcell-builder (``bosh-stemcell/lib/bosh/stemcell/stemcell_packager.rb``) and of the
CPIs (bosh-docker-cpi ``stemcell/metadata.go``). The name of a stemcell for arm64 contains the architecture, as RFC 0062
of the Cloud Foundry Foundation proposes.
"""

# ruff: noqa: INP001, T201 - a program for the terminal

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from isal import igzip

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from hatch_build import revision, semantic_version  # noqa: E402 - a module in the parent directory
from stemcell_overlay import sbom  # noqa: E402

TAG: Final = "localhost/agent-shim/stemcell"
API_VERSION: Final = 3
"""From API version 3 on, the Director may send signed URLs instead of the blobstore's credentials."""
HEAVY: Final = ["warden-tar", "general-tar"]
LIGHT: Final = ["docker-light", "warden-light", "general-tar"]
CHUNK: Final = 1 << 20
BASES: Final = {"amd64": "ghcr.io/cloudfoundry/ubuntu-noble-stemcell:latest", "arm64": "debian:bookworm-slim"}
"""Default base image for each architecture. Official stemcell images exist only for amd64."""
OWN: Final = {"x86_64": "amd64", "aarch64": "arm64"}
"""Maps the output of ``uname -m`` to Debian's name for the architecture."""
_WORDS: Final = {"amd64": "x86_64", "arm64": "arm64"}
"""Maps Debian's name for an architecture to the name in manifests."""

FACTS: Final = """
. /etc/os-release
echo "os=$ID-$VERSION_CODENAME"
echo "version=$(cat /var/vcap/bosh/etc/stemcell_version)"
echo "architecture=$(dpkg --print-architecture)"
echo --
dpkg-query --show --showformat '${Package}\\t${Version}\\t${Architecture}\\t${Provides}\\t${Pre-Depends}, ${Depends}\\n'
echo --
/opt/agent_shim/bin/python3 -c '
import re
from importlib import metadata
for found in sorted(metadata.distributions(), key=lambda found: found.name):
    needs = [line for line in found.requires or () if "extra ==" not in line]
    print(found.name, found.version, *(re.match("[A-Za-z0-9._-]+", line)[0] for line in needs))
'
echo --
cd /usr/share/doc
grep -HoE '^License:.*|/usr/share/common-licenses/[A-Za-z0-9.+-]+' */copyright
echo --
cat /var/vcap/bosh/etc/dev_tools_file_list
echo --
dpkg --list
"""
"""Script that prints facts about an image: its operating system, its Debian packages, the agent's Python packages,
licences in Debian's copyright files, files that belong to compilers, and the output of ``dpkg -l``. Packages are
printed with their dependencies.
"""
_NAMES: Final = re.compile(r"(?:^|[,|])\s*([^\s,|(:]+)")
"""Matches the package names in a field of a Debian package, such as ``Depends``."""
_SYNOPSIS: Final = re.compile(r"[^ ,]+(,? (or|and|with|/) [^ ,]+( exception)?)*")
"""Matches a licence's short name in the ``License`` field of a copyright file. It does not match a whole licence text,
which some files have in that field.
"""


def main() -> int:
    arguments = _parser().parse_args()
    try:
        if arguments.sbom:
            sys.stdout.buffer.write(components(arguments))
            return 0
        made = light(arguments) if arguments.light else heavy(arguments)
    except subprocess.CalledProcessError as exc:
        command = f"{Path(exc.cmd[0]).name} {exc.cmd[1]}"
        print(f"stemcell: cannot make a stemcell: `{command}` ended with {exc.returncode}", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"stemcell: cannot make a stemcell: {exc.strerror}: {exc.filename}", file=sys.stderr)
        return 1
    print(made)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./dev stemcell", description="Make a stemcell for container CPIs.")
    parser.add_argument("--light", action="store_true", help="make a stemcell that refers to an image in a registry")
    parser.add_argument("--sbom", action="store_true", help="only print the components of --image")
    parser.add_argument("--image", help="name of an existing image; with --light, NAME:TAG@sha256:DIGEST")
    bases = " and ".join(f"{base} for {architecture}" for architecture, base in BASES.items())
    parser.add_argument("--base", help=f"base of the image (default: {bases})")
    parser.add_argument("--arch", choices=BASES, help="architecture (default: that of the image, or of this machine)")
    parser.add_argument("--os", help="operating system in the manifest: that of the image, with or without -SUFFIX")
    parser.add_argument("--version", help="version of the stemcell (default: that of the base and of the agent)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the tarball (default: dist)")
    parser.add_argument("build", nargs="*", metavar="BUILD OPTION", help="options for podman or docker build, after --")
    return parser


def light(arguments: argparse.Namespace) -> Path:
    """Write a stemcell that refers to an image in a registry. The image is neither pulled nor run."""
    reference, at, digest = (arguments.image or "").partition("@")
    if not at or re.fullmatch(r"sha256:[0-9a-f]{64}", digest) is None:
        raise SystemExit("stemcell: cannot make a light stemcell without --image NAME:TAG@sha256:DIGEST")
    system, architecture = arguments.os or "ubuntu-noble", arguments.arch or "amd64"
    version = version_for(architecture, arguments.version or own_version())
    pointers = {"image_reference": reference, "digest": digest, "image": f"{reference}@{digest}"}
    sums = digests(iter(()))  # The member "image" is empty.
    files = {
        "stemcell.MF": manifest(system, architecture, version, LIGHT, sums, pointers).encode(),
        "packages.txt": b"",
        "dev_tools_file_list.txt": b"",
        "image": b"",
    }
    path = _target(arguments.out, f"light-{name_of(system, architecture)}", version)
    with _tarball(path) as tarball:
        for name, content in files.items():
            _add(tarball, name, content)
    return path


def heavy(arguments: argparse.Namespace) -> Path:
    """Write a stemcell that contains the root file system of a built or existing image."""
    tool = shutil.which("podman") or shutil.which("docker")
    if tool is None:
        raise SystemExit("stemcell: cannot make a stemcell: neither podman nor docker is installed")
    image = arguments.image or _build(tool, arguments)
    facts, parts, dev_tools, dpkg_list = _facts(tool, image)
    architecture = facts["architecture"]
    if arguments.arch not in (None, architecture):
        raise SystemExit(f"stemcell: cannot make a stemcell for {arguments.arch}: the image is for {architecture}")
    system = arguments.os or facts["os"]
    if system != facts["os"] and not system.startswith(f"{facts['os']}-"):
        raise SystemExit(f"stemcell: cannot make a stemcell for {system}: the image is {facts['os']}")
    version = version_for(architecture, arguments.version or own_version(facts["version"]))
    name = name_of(system, architecture)
    with tempfile.TemporaryDirectory(dir=_made(arguments.out)) as scratch:
        root = Path(scratch, "image")
        _export(tool, image, root)
        with root.open("rb") as file:
            sums = digests(iter(lambda: file.read(CHUNK), b""))
        path = _target(arguments.out, name, version)
        with _tarball(path) as tarball:
            _add(tarball, "stemcell.MF", manifest(system, architecture, version, HEAVY, sums, {}).encode())
            _add(tarball, "packages.txt", dpkg_list.encode())
            _add(tarball, "dev_tools_file_list.txt", dev_tools.encode())
            tarball.add(root, "image", filter=_as_built)
            _add(tarball, "sbom.spdx.json", _json(spdx(name, version, parts)))
            _add(tarball, "sbom.cdx.json", _json(cyclonedx(name, version, parts)))
    return path


def _build(tool: str, arguments: argparse.Namespace) -> str:
    """Build the image with the Dockerfile and return its name."""
    own = OWN.get(platform.machine(), "")
    architecture = arguments.arch or own
    image = TAG if architecture == own else f"{TAG}-{architecture}"
    if architecture != own and not is_emulated(architecture):
        raise SystemExit(f"stemcell: cannot build an image for {architecture}: {NO_EMULATOR}")
    wanted = {"BASE_IMAGE": arguments.base or BASES.get(architecture), "STEMCELL_VERSION": arguments.version}
    wanted |= {"REVISION": revision(), "VERSION": semantic_version()}
    given = [f"--build-arg={name}={value}" for name, value in wanted.items() if value]
    if arguments.arch:
        given.append(f"--platform=linux/{architecture}")
    subprocess.run([tool, "build", *given, *arguments.build, "--tag", image, ROOT], check=True, stdout=sys.stderr)
    return image


NO_EMULATOR: Final = "no emulator is registered; apt-get install qemu-user-static binfmt-support"


def is_emulated(architecture: str) -> bool:
    """Return True if an emulator for this architecture is registered with the kernel (binfmt_misc)."""
    machine = next(machine for machine, known in OWN.items() if known == architecture)
    return any(Path("/proc/sys/fs/binfmt_misc").glob(f"*{machine}*"))


def components(arguments: argparse.Namespace) -> bytes:
    """Return a CycloneDX document with an image's components."""
    tool = shutil.which("podman") or shutil.which("docker")
    if tool is None or not arguments.image:
        raise SystemExit(
            "stemcell: cannot list components: --image is missing, or neither podman nor docker is installed"
        )
    facts, parts, *_ = _facts(tool, arguments.image)
    architecture = facts["architecture"]
    version = version_for(architecture, arguments.version or own_version(facts["version"]))
    return _json(cyclonedx(name_of(facts["os"], architecture), version, parts))


@dataclass(frozen=True)
class Part:
    """A Debian package, or one of the agent's Python packages. ``licences`` are short names, and empty if they are
    unknown.
    """

    name: str
    version: str
    url: str
    licences: tuple[str, ...]
    needs: tuple[str, ...]
    """URLs of the parts on which this part depends."""


def _facts(tool: str, image: str) -> tuple[dict[str, str], list[Part], str, str]:
    """Run the image to find out what it contains.

    Return a dict with the operating system, version and architecture; the installed packages; the list of files that
    belong to compilers; and the output of ``dpkg -l``.
    """
    run = [tool, "run", "--rm", "--network=none", image, "sh", "-c", FACTS]
    output = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout
    system, debian, python, copyrights, dev_tools, dpkg_list = output.split("--\n", 5)
    facts = dict(line.split("=", 1) for line in system.split())
    parts = [
        *packages(facts["os"].partition("-")[0], debian.splitlines(), licences(copyrights.splitlines())),
        *modules(python.splitlines()),
    ]
    return facts, parts, dev_tools, dpkg_list


def packages(distribution: str, lines: Iterable[str], known: dict[str, tuple[str, ...]]) -> list[Part]:
    """Return the Debian packages that ``lines`` describe. ``known`` maps the name of a package to its licences.

    A dependency can have several alternatives, or be a virtual package that several packages provide. All of those that
    are installed are returned as dependencies.
    """
    rows = [line.split("\t") for line in lines]
    urls = [f"pkg:deb/{distribution}/{name}@{version}?arch={architecture}" for name, version, architecture, *_ in rows]
    urls_by_name: dict[str, list[str]] = {}
    for url, (name, _, _, provides, _) in zip(urls, rows, strict=True):
        for provided in (name, *_NAMES.findall(provides)):
            urls_by_name.setdefault(provided, []).append(url)
    return [
        Part(name, version, url, known.get(name, ()), _urls(urls_by_name, _NAMES.findall(depends), url))
        for url, (name, version, _, _, depends) in zip(urls, rows, strict=True)
    ]


def modules(lines: Iterable[str]) -> list[Part]:
    """Return the agent's Python packages. Each of ``lines`` contains a name, a version and the names of
    dependencies. The licences come from the packages that are installed on this machine.
    """
    rows = [line.split() for line in lines]
    urls_by_name = {_normal(name): [f"pkg:pypi/{_normal(name)}@{version}"] for name, version, *_ in rows}
    return [
        Part(name, version, url, (sbom.licence(name),), _urls(urls_by_name, map(_normal, needs), url))
        for name, version, *needs in rows
        for url in urls_by_name[_normal(name)]
    ]


def _normal(name: str) -> str:
    """Normalize the name of a Python package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _urls(urls_by_name: dict[str, list[str]], names: Iterable[str], own: str) -> tuple[str, ...]:
    """Return the URLs of the installed packages with these names. ``own`` is left out, so that no package depends on
    itself.
    """
    return tuple(sorted({url for name in names for url in urls_by_name.get(name, ())} - {own}))


def licences(lines: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the licences of each Debian package. Each of ``lines`` has the form ``PACKAGE/copyright:MATCH``.

    MATCH is a ``License`` field or, in files that are not machine-readable, the path of a common licence.
    """
    fields: dict[str, set[str]] = {}
    texts: dict[str, set[str]] = {}
    for line in lines:
        package, _, match = line.partition("/copyright:")
        if not match.startswith("License:"):
            texts.setdefault(package, set()).add(match.rpartition("/")[2].rstrip("."))
        elif _SYNOPSIS.fullmatch(synopsis := match.removeprefix("License:").strip()):
            fields.setdefault(package, set()).add(synopsis)
    return {package: tuple(sorted(found)) for package, found in (texts | fields).items()}


def own_version(base: str = "0.0.0") -> str:
    """Return this project's version. If the stemcell is built on a base stemcell, the base's version comes first.

    ``base`` is the base stemcell's version, or 0.0.0 if the base is another image.
    """
    own = semantic_version()
    return own if base == "0.0.0" else f"{base}+shim.{own}"


def version_for(architecture: str, version: str) -> str:
    """Return a stemcell's version with the architecture, unless that is amd64 or the version already contains it.

    Without the architecture, a Director would use packages that were compiled on one architecture for the other.
    """
    if architecture == "amd64" or architecture in version:
        return version
    return f"{version}{'.' if '+' in version else '+'}{architecture}"


def name_of(system: str, architecture: str) -> str:
    """Return a stemcell's name, including the architecture unless that is amd64.

    Without the architecture, a Director would mistake the second stemcell with the same name and version for the first.
    """
    words = ["bosh-warden-boshlite", system, *([architecture] if architecture != "amd64" else []), "agent-shim"]
    return "-".join(words)


def manifest(
    system: str, architecture: str, version: str, formats: list[str], sums: str, pointers: dict[str, str]
) -> str:
    """Return the content of ``stemcell.MF``. Values are written as JSON, which is valid YAML.

    ``sums`` are the digests of the stemcell's image. ``pointers`` are the cloud properties that name the image of a
    light stemcell.
    """
    name, distribution = name_of(system, architecture), system.partition("-")[0]
    properties = {
        "name": name,
        "version": version,
        "infrastructure": "warden",
        "hypervisor": "boshlite",
        "disk": 5120,
        "disk_format": "files",
        "container_format": "bare",
        "os_type": "linux",
        "os_distro": distribution,
        "architecture": _WORDS[architecture],
        "root_device_name": "/dev/sda1",
        **pointers,
    }
    members: dict[str, Any] = {
        "name": name,
        "version": version,
        "bosh_protocol": "1",
        "api_version": API_VERSION,
        "sha1": sums,
        "operating_system": system,
        "architecture": _WORDS[architecture],
        "stemcell_formats": formats,
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in members.items()]
    lines += ["cloud_properties:", *(f"  {key}: {json.dumps(value)}" for key, value in properties.items())]
    return "---\n" + "\n".join(lines) + "\n"


def digests(chunks: Iterator[bytes]) -> str:
    """Return SHA-1 and SHA-256 digests in the format that bosh-utils parses (crypto/multiple_digest.go)."""
    sha1, sha256 = hashlib.sha1(usedforsecurity=False), hashlib.sha256()
    for chunk in chunks:
        sha1.update(chunk)
        sha256.update(chunk)
    return f"{sha1.hexdigest()};sha256:{sha256.hexdigest()}"


def cyclonedx(name: str, version: str, parts: list[Part]) -> dict[str, Any]:
    """Return a CycloneDX 1.5 document in which the stemcell depends on each of its components."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "operating-system", "bom-ref": name, "name": name, "version": version}},
        "dependencies": [
            {"ref": name, "dependsOn": [part.url for part in parts]},
            *({"ref": part.url, "dependsOn": part.needs} for part in parts),
        ],
        "components": [
            {
                "type": "library",
                "bom-ref": part.url,
                "name": part.name,
                "version": part.version,
                "purl": part.url,
                "licenses": [{"license": {"name": licence}} for licence in part.licences],
            }
            for part in parts
        ],
    }


def spdx(stemcell: str, version: str, parts: list[Part]) -> dict[str, Any]:
    """Return an SPDX 2.3 document with the stemcell's components.

    Licences are written as comments, because Debian's short names are not SPDX identifiers.
    """
    # Leave out the current time, so that the same packages always produce the same document.
    name = f"{stemcell}-{version}"
    ids = {part.url: f"SPDXRef-{number}" for number, part in enumerate(parts)}
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", one) for one in ids.values()]
    relations += [(ids[part.url], "DEPENDS_ON", ids[need]) for part in parts for need in part.needs]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": f"https://spdx.org/spdxdocs/{name}",
        "creationInfo": {"creators": ["Tool: agent-shim"], "created": "1980-01-01T00:00:00Z"},
        "packages": [
            {
                "SPDXID": ids[part.url],
                "name": part.name,
                "versionInfo": part.version,
                "downloadLocation": "NOASSERTION",
                "licenseDeclared": "NOASSERTION",
                "licenseComments": ", ".join(part.licences) or "unknown",
                "externalRefs": [
                    {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": part.url}
                ],
            }
            for part in parts
        ],
        "relationships": [
            {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}
            for one, kind, other in relations
        ],
    }


def build_time() -> int:
    """Return SOURCE_DATE_EPOCH or else the time of this commit, so that the same sources produce the same stemcell."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    log = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    if (ROOT / ".git").exists():
        return int(subprocess.run(log, check=True, capture_output=True, text=True).stdout)
    return int(Path(__file__).stat().st_mtime)


# --- files ------------------------------------------------------------------------------------------------------------


def _export(tool: str, image: str, target: Path) -> None:
    """Write an image's root file system to a gzipped tarball."""
    create = [tool, "create", image, "true"]
    container = subprocess.run(create, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    try:
        export = subprocess.Popen([tool, "export", container], stdout=subprocess.PIPE)
        assert export.stdout is not None
        with target.open("wb") as raw, _packed(raw) as packed:
            shutil.copyfileobj(export.stdout, packed, CHUNK)
        if code := export.wait():
            raise subprocess.CalledProcessError(code, export.args)
    finally:
        subprocess.run([tool, "rm", "--force", container], check=True, capture_output=True)


def _made(directory: Path) -> Path:
    """Create a directory unless it exists, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _target(out: Path, name: str, version: str) -> Path:
    """Return the tarball's path, and create its directory. The file name is like that of an official stemcell."""
    return _made(out) / f"{name.replace('bosh-', 'bosh-stemcell-' + version + '-', 1)}.tgz"


@contextmanager
def _tarball(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a tarball for writing. It gets its final name when it is complete."""
    beside = path.with_name(path.name + ".part")
    # Do not compress this tarball, because its largest member is already compressed.
    with (
        beside.open("wb") as raw,
        gzip.GzipFile("", mode="wb", compresslevel=0, fileobj=raw, mtime=0) as stored,
        tarfile.open(fileobj=stored, mode="w") as tarball,
    ):
        yield tarball
    beside.replace(path)


def _packed(raw: BinaryIO) -> Any:
    """Open a gzip file for writing. The same content always produces the same bytes."""
    return igzip.IGzipFile(fileobj=raw, mode="wb", compresslevel=2, mtime=0)  # type: ignore[no-untyped-call]


def _add(tarball: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    tarball.addfile(member, io.BytesIO(content))


def _as_built(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Set the owner to root and the modification time to ``build_time``. LXD shows that time as the image's creation
    date.
    """
    member.uid = member.gid = 0
    member.mtime = build_time()
    member.uname = member.gname = ""
    member.mode = 0o644
    return member


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main())
