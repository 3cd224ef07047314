"""Runs tests as arm64 programs on an x86-64 machine.

    python -m tests.support.arm64 [ARGUMENT...]

runs pytest with these arguments in a Debian arm64 root file system that contains a copy of this project. The kernel
starts each arm64 program in the emulator qemu-user (``binfmt_misc``). The tests share the host's network, users and
devices. Needs root.

Without a path, all unit tests run. Tests that run job programs fail, because qemu-user does not support making a keeper
a child subreaper (PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.support.guest import LOCK, ROOT

CACHE: Final = ROOT / ".arm64"
SUITE: Final = "bookworm"
PYTHON: Final = "3.11"
"""Python version in the Debian release ``SUITE``."""
PACKAGES: Final = (
    "acl attr bash bzip2 coreutils dash diffutils findutils gawk gcc git grep gzip iproute2 libc6-dev login mount "
    "openssh-client openssl passwd procps psmisc python3 python3-venv sed tar util-linux xz-utils zstd"
)
PLATFORMS: Final = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in (17, 24, 28, 34)))
BINFMT: Final = Path("/proc/sys/fs/binfmt_misc")
UNSUPPORTED: Final = ("tests/unit/edges/test_metrics.py::test_agent_exports_the_standard_process_metrics",)
"""Tests that fail because the emulator's ``/proc/self/stat`` reports no resident memory."""

_ENTER: Final = """
set -eu
mount --make-rprivate /
mount --rbind /dev "$0/dev"
mount -t proc proc "$0/proc"
mount --rbind /sys "$0/sys"
mount -t tmpfs -o mode=1777 tmpfs "$0/tmp"
cd "$0"
exec chroot . /usr/bin/env -i -C /project PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \\
    PYTHONPATH=/site SHIM_TEST_SLOW=10 sh -c 'python3 hatch_build.py && exec python3 -m pytest "$@"' pytest "$@"
"""


def main(arguments: list[str]) -> int:
    """Run the tests and return pytest's exit code."""
    enable_emulation()
    system = _system()
    _copy_project(system / "project")
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-profile=quick", "--timeout=1800"]
    options += [f"--deselect={each}" for each in UNSUPPORTED]
    named = [each for each in arguments if Path(each.partition("::")[0]).exists()]
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    tests = [*options, "-n", str(os.cpu_count()), *arguments, *([] if named else ["tests/unit"])]
    return subprocess.run([*namespaces, "sh", "-c", _ENTER, system, *tests], check=False).returncode


def enable_emulation() -> None:
    """Register the emulator with ``binfmt_misc`` so that the kernel can start arm64 programs.

    Mount ``binfmt_misc`` first if necessary, because containers usually do not have it.
    """
    if not (BINFMT / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT], check=True)
    if not (BINFMT / "qemu-aarch64").exists():
        subprocess.run(["update-binfmts", "--enable", "qemu-aarch64"], check=True)


def _system() -> Path:
    """Return the directory with the arm64 Debian system. The system is rebuilt every week to include security updates.

    Packages are unpacked without running their installation scripts, which would take a quarter of an hour in the
    emulator. For the same reason, the arm64 wheels are installed by the host's pip.
    """
    key = hashlib.sha256("\0".join([SUITE, PACKAGES, LOCK.read_text(), time.strftime("%Gw%V")]).encode()).hexdigest()[
        :16
    ]
    system = CACHE / key
    if system.exists():
        return system
    sys.stderr.write(f"arm64: unpacking {SUITE} for arm64 (once)\\n")
    shutil.rmtree(CACHE, ignore_errors=True)
    CACHE.mkdir()
    half = CACHE / f"{key}.part"
    hooks = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"
    include = f"--include={PACKAGES.replace(' ', ',')}"
    _do("mmdebstrap", "--quiet", "--arch=arm64", "--variant=extract", hooks, include, SUITE, half)
    wheels = ["--only-binary=:all:", "--python-version", PYTHON, *(f"--platform={each}" for each in PLATFORMS)]
    hashed = ["--require-hashes", "--no-deps", "-r", str(LOCK)]
    _do(sys.executable, "-m", "pip", "install", "-qq", *hashed, *wheels, "--target", half / "site")
    for name in ("passwd", "group", "hosts"):  # The installation scripts, which create the first two, were not run.
        shutil.copy(f"/etc/{name}", half / "etc" / name)
    half.rename(system)
    return system


def _copy_project(project: Path) -> None:
    """Copy this project's files to ``project``: those that git tracks, and new files that it does not ignore."""
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir()
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    packed = subprocess.run(
        ["tar", "--null", "--files-from=-", "--ignore-failed-read", "-cf", "-"],
        cwd=ROOT, input=names, check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run(["tar", "-xf", "-", "-C", project], input=packed.stdout, check=True)


def _do(*argv: str | Path) -> None:
    subprocess.run(argv, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
