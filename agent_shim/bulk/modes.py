"""Sets the modes and owners of installed bundles, as the Go agent does (agent/applier/jobs/owner_fix.go)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from agent_shim.host import files

DIRECTORY_MODE: Final = {"job": 0o750, "package": 0o755}
"""Mode, by kind of bundle, of an installed bundle's directory, of the parent directory that contains all versions, and
of the directory that contains links to the bundles in use.
"""


def set_owners_and_modes(kind: str, tree: Path, owner: str | None) -> None:
    """Give an unpacked tree the modes and owners of an installed bundle (agent/applier/jobs/owner_fix.go).

    In a job, everything belongs to ``owner``, directories and all files below ``bin`` have mode 0750, and other files
    have mode 0640. In a package, only the top directory gets a mode and an owner, and in a source only a mode. If
    ``owner`` is None, owners do not change.
    """
    if kind != "job":
        files.make_dir(tree, 0o755, owner if kind == "package" else None)
        return
    uid, gid = files.owner_ids(owner)
    for here, directories, names, fd in os.fwalk(tree):
        is_bin = Path(here).is_relative_to(tree / "bin")
        os.fchown(fd, uid, gid)
        os.fchmod(fd, 0o750)
        for name in names + directories:
            os.chown(name, uid, gid, dir_fd=fd, follow_symlinks=False)
        for name in names:
            if not os.path.islink(os.path.join(here, name)):  # noqa: PTH114, PTH118 - faster than pathlib for many files
                os.chmod(name, 0o750 if is_bin else 0o640, dir_fd=fd)
