"""Build hooks for hatchling. They set the version and commit, create the wheel's README, compile the keeper, and
generate the completion scripts and the manual page.

``python hatch_build.py`` writes the files that a checkout needs from a build: the completion scripts that ``agent-shim
completion`` prints, the manual page and the keeper. The keeper is compiled only if it is missing or older than its
source.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent
SOURCE = ROOT / "agent_shim/__init__.py"
HOME = "https://github.com/agent-shim/agent-shim"
KEEPER = "agent_shim/host/keeper"
"""Path of the keeper, the program that supervises job processes. Its source has the same path with ``.c``."""
KEEPER_FLAGS = ("-std=gnu11", "-Os", "-Wall", "-Wextra", "-Werror", "-s")
COMPLETION = "agent_shim/cli/completion"
"""Path of the directory with the completion scripts."""
SHELL_PAGES = {
    "agent-shim.bash": "share/bash-completion/completions/agent-shim",
    "_agent-shim": "share/zsh/site-functions/_agent-shim",
    "agent-shim.fish": "share/fish/vendor_completions.d/agent-shim.fish",
    "agent-shim.1": "share/man/man1/agent-shim.1",
}
"""The completion scripts and the manual page, each with its path relative to the installation prefix."""


def version() -> str:
    """Return the version. Between releases, the commit is appended if it is known.

    Examples are ``0.3.0`` for a release and ``0.3.0.dev0+g…`` between releases.
    """
    number, commit = _written("__version__"), revision()
    if commit and number.endswith(".dev0"):
        # A commit has 40 digits, which "-dirty" may follow. A local version must not contain "-".
        return f"{number}+g{commit[:9]}{commit[40:].replace('-', '.')}"
    return number


def semantic_version() -> str:
    """Return the version as a semantic version, such as ``0.3.0-dev.g…``, because BOSH and image tags need one."""
    return version().replace(".dev0+", "-dev.").replace(".dev0", "-dev")


def revision() -> str:
    """Return the commit, or "" if it is unknown. If tracked files have changed, ``-dirty`` is appended.

    The commit comes from the source distribution, else from ``AGENT_SHIM_REVISION`` (for builds without git), else from
    git.
    """
    return _written("__revision__") or os.environ.get("AGENT_SHIM_REVISION", "") or _commit_from_git()


def _commit_from_git() -> str:
    """Return the commit of this checkout, with ``-dirty`` if tracked files have changed, or "" if it is unknown."""
    # Without this check, git would return the commit of another project if this tree was unpacked in that project's
    # checkout.
    if not (ROOT / ".git").exists():
        return ""
    # --exclude=* ignores all tags, so that the full commit is printed.
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _written(name: str) -> str:
    """Return the value of a string constant in agent_shim/__init__.py, or "" if it is missing."""
    found = re.search(rf'^{name} = "([^"]*)"', SOURCE.read_text(), re.MULTILINE)
    return found[1] if found else ""


def page(readme: str) -> str:
    """Return the text of README.md with each relative link replaced by a URL on GitHub for this commit or release."""
    # A commit has 40 digits, which "-dirty" may follow.
    ref = (revision()[:40] if "dev" in version() else f"v{version()}") or "main"
    raw = HOME.replace("//github.com/", "//raw.githubusercontent.com/")
    # Images need the URL of the raw file; all other links lead to the file's page.
    readme = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{raw}/{ref}/", readme)
    return re.sub(r"((?<!!)\[[^]!]*\]\()(?!https?:|#)", rf"\g<1>{HOME}/blob/{ref}/", readme)


def machine() -> str:
    """Return the architecture for which to build a wheel, such as ``x86_64``.

    It is ``AGENT_SHIM_MACHINE`` or, if that is not set, the architecture of this machine.
    """
    return os.environ.get("AGENT_SHIM_MACHINE") or platform.machine()


def compilers() -> list[list[str]]:
    """Return the commands of installed C compilers for ``machine``, in order of preference.

    musl comes first, because it produces the smallest program. The name of a cross compiler contains the architecture,
    whereas zig compiles for every architecture.
    """
    if command := os.environ.get("CC", "").split():
        return [command]
    is_own = machine() == platform.machine()
    names = (
        ("musl-gcc", "cc", "gcc", "clang") if is_own else (f"{machine()}-linux-musl-gcc", f"{machine()}-linux-gnu-gcc")
    )
    found = [[path] for name in names if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "cc", "-target", f"{machine()}-linux-musl"])
    return found


def build_keeper(target: Path, links: tuple[str, ...] = ("-static",)) -> None:
    """Compile the keeper to ``target``. Try each kind of linking in ``links`` with each compiler until one combination
    succeeds.

    Raises ``SystemExit`` if all of them fail.
    """
    reasons = ["there is no C compiler: install musl-gcc, or gcc, or the package ziglang of PyPI"]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".keeper-") as scratch:
        program = Path(scratch, "keeper")
        for link in links:
            for command in compilers():
                argv = [*command, *KEEPER_FLAGS, link, "-o", str(program), str(ROOT / f"{KEEPER}.c")]
                done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
                if done.returncode == 0:
                    program.replace(target)  # Another build may be writing the same file, so replace it atomically.
                    return
                reasons.append(f"{' '.join(argv)}\n{done.stdout}")
    raise SystemExit(f"cannot compile {KEEPER}.c: {reasons[-1]}")


def build_keeper_of_checkout() -> None:
    """Compile the keeper next to its source if it is missing or older than the source.

    Dynamic linking is allowed here, because Fedora's compiler package has no static libraries.
    """
    target, source = ROOT / KEEPER, ROOT / f"{KEEPER}.c"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        build_keeper(target, ("-static", "-no-pie"))


def write_shell_pages(target: Path) -> None:
    """Write the completion scripts and the manual page to a directory.

    They are generated from the definition of the command line, which can be imported without the agent's libraries.
    """
    sys.path.insert(0, str(ROOT))
    from tools import shell_pages

    target.mkdir(exist_ok=True)
    for name in SHELL_PAGES:
        (target / name).write_text(shell_pages.page(name))


class PageHook(MetadataHookInterface):
    """Sets the description (from README.md) and the URLs in a package's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the description and the URLs to ``metadata``. hatchling calls this for each build."""
        text = page((ROOT / "README.md").read_text())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            "Source": HOME,
            "Documentation": f"{HOME}/blob/main/docs/README.md",
            "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
            "Issues": f"{HOME}/issues",
        }


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Writes the version and the commit into ``agent_shim/__init__.py`` of a build, and adds the keeper, the
    completions and the manual page to a wheel.
    """

    def dependencies(self) -> list[str]:
        """Request a C compiler from PyPI (100 MB) if a wheel is being built and no compiler is installed."""
        return ["ziglang"] if self.target_name == "wheel" and not compilers() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add files to a build before hatchling creates it. An editable installation uses the files in the checkout.

        ``version`` is hatchling's name for the kind of build: ``standard`` or ``editable``.
        """
        if version == "editable":
            build_checkout()
            build_data["shared_data"].update({f"{COMPLETION}/{name}": at for name, at in SHELL_PAGES.items()})
            return
        text = SOURCE.read_text()
        # The parameter ``version`` shadows this module's function ``version``.
        for name, value in (("__version__", globals()["version"]()), ("__revision__", revision())):
            text = re.sub(rf'^{name} = "[^"]*"', f'{name} = "{value}"', text, flags=re.MULTILINE)
        # hatchling reads the files after this method has returned, so remove them only when the process exits.
        scratch = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, scratch)
        init = scratch / "__init__.py"
        init.write_text(text)
        init.chmod(0o644)
        build_data["force_include"][str(init)] = "agent_shim/__init__.py"
        if self.target_name == "wheel":
            build_keeper(scratch / "keeper")
            build_data["force_include"][str(scratch / "keeper")] = KEEPER
            write_shell_pages(scratch / "pages")
            build_data["force_include"][str(scratch / "pages")] = COMPLETION
            build_data["shared_data"].update({str(scratch / "pages" / name): at for name, at in SHELL_PAGES.items()})
            # A static program needs no libc, so the wheel can be installed on systems with glibc or musl. The tags
            # contain the minimum version of each.
            build_data["tag"] = f"py3-none-manylinux_2_17_{machine()}.musllinux_1_1_{machine()}"
            build_data["pure_python"] = False


def build_checkout() -> None:
    """Write the files that a checkout needs from a build."""
    build_keeper_of_checkout()
    write_shell_pages(ROOT / COMPLETION)


if __name__ == "__main__":
    build_checkout()
