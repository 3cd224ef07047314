"""Checkouts of releases, whose jobs are rendered by ``render.rb``."""

from __future__ import annotations

import json
import os
import posixpath
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ADDRESS: Final = "10.244.0.5"
"""The instance's IP address in networks and links."""

RENDER_TIMEOUT_S: Final = 120
MAX_FILE_BYTES: Final = 1 << 20
LINK_MODE: Final = "120000"
"""The mode that git records for symbolic links."""


@dataclass(frozen=True)
class Job:
    """A rendered job. ``files`` maps paths in the job's directory to their contents. If rendering failed, ``error``
    says why.
    """

    release: str
    name: str
    files: dict[str, str]
    sources: dict[str, str]
    """Templates by their path in the release. A difference refers to a line in one of them."""
    packages: tuple[str, ...]
    guessed: tuple[str, ...] = ()
    error: str = ""

    @property
    def monit(self) -> str:
        """Return the combined text of the job's monit files."""
        return "\n".join(
            text for path, text in sorted(self.files.items()) if path == "monit" or path.endswith(".monit")
        )

    def __str__(self) -> str:
        return f"{self.release}/{self.name}"


@dataclass
class Checkout:
    """A release in a work tree or in a bare git directory."""

    path: Path
    _places: dict[str, str] = field(default_factory=dict)
    """Maps each path to the path at which its content is stored. The two differ for files that are reached through
    symbolic links.
    """

    @property
    def name(self) -> str:
        named = self.path
        while named.name in ("repo", ".git"):
            named = named.parent
        return named.name.replace("+", "/")

    def names(self) -> list[str]:
        """Return the paths of all files, including those that jobs reach through symbolic links."""
        if not self._places:
            self._places = self._committed() if self._is_bare else self._on_disk()
        return sorted(self._places)

    def read(self, name: str) -> str:
        """Return the text of a file, or "" if it is too large to be text."""
        self.names()
        place = self._places[name]
        raw = self._git("show", f"HEAD:{place}") if self._is_bare else (self.path / place).read_bytes()
        return raw.decode(errors="replace") if len(raw) < MAX_FILE_BYTES else ""

    def _on_disk(self) -> dict[str, str]:
        places = (Path(above, name) for above, _, names in os.walk(self.path, followlinks=True) for name in names)
        found = (str(one.relative_to(self.path)) for one in places if one.is_file() and ".git" not in one.parts)
        return {name: name for name in found}

    def _committed(self) -> dict[str, str]:
        listed = self._git("ls-tree", "-r", "-z", "HEAD").decode(errors="replace").split("\0")
        modes = {line.partition("\t")[2]: line[:6] for line in listed if line}
        places = {name: name for name, mode in modes.items() if mode != LINK_MODE}
        for link in [name for name, mode in modes.items() if mode == LINK_MODE and name.startswith("jobs/")]:
            words = self._git("show", f"HEAD:{link}").decode()
            target = posixpath.normpath(posixpath.join(posixpath.dirname(link), words))
            same = [name for name in modes if name == target or name.startswith(f"{target}/")]
            places |= {link + name[len(target) :]: name for name in same}
        return places

    @property
    def _is_bare(self) -> bool:
        return (self.path / "HEAD").is_file()

    def _git(self, *arguments: str) -> bytes:
        argv = ["git", "--git-dir", str(self.path), *arguments]
        return subprocess.run(argv, capture_output=True, check=True).stdout

    def jobs(self, values: dict[str, Any], pem: str, key: str = "") -> Iterator[Job]:
        """Yield each job, rendered with its defaults and with ``values``.

        ``values`` contains properties for ``RELEASE/JOB`` or for ``JOB``.
        """
        texts: dict[str, dict[str, str]] = {}
        for name in self.names():
            parts = name.split("/", 2)
            if (
                len(parts) == 3
                and parts[0] == "jobs"
                and (parts[2] in ("spec", "monit") or parts[2][:10] == "templates/")
            ):
                texts.setdefault(parts[1], {})[parts[2]] = self.read(name)
        found = {name: files for name, files in texts.items() if "spec" in files}
        document = {
            "jobs": [{"name": name, "spec": files["spec"], "templates": files} for name, files in found.items()],
            "values": {name: values.get(f"{self.name}/{name}") or values.get(name) or {} for name in found},
            "address": ADDRESS,
            "pem": pem,
            "key": key,
        }
        argv = ["ruby", str(Path(__file__).with_name("render.rb"))]
        done = subprocess.run(
            argv, input=json.dumps(document).encode(), capture_output=True, timeout=RENDER_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"cannot render {self.name}: {done.stderr.decode(errors='replace')[-400:]}")
        for one in json.loads(done.stdout):
            sources = {f"jobs/{one['name']}/{path}": text for path, text in found[one["name"]].items()}
            packages = tuple(str(name) for name in one["packages"] if name)
            guessed = tuple(map(str, one["guessed"]))
            windows = "for Windows" if any(path.endswith(".ps1") for path in one["files"]) else ""
            yield Job(self.name, one["name"], one["files"], sources, packages, guessed, one["error"] or windows)
