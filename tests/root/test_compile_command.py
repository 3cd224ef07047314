"""Tests ``bosh-agent compile`` on a real ``/var/vcap``."""

from __future__ import annotations

import shlex
import sys
import tarfile
from pathlib import Path

import pytest

from agent_shim.cli import release_tarball
from tests.integration.test_compile_command import LIBRARY, release
from tests.support.machine import CODE, Machine

pytestmark = pytest.mark.root

CALL = "import sys; from agent_shim.cli.commands import bosh_agent; sys.exit(bosh_agent(sys.argv[1:]))"


def test_compile_command_targets_the_images_stemcell(box: Machine, tmp_path: Path) -> None:
    """The image's os-release and stemcell_version files name the stemcell."""
    script = f"set -e; {LIBRARY}; stat -Lc %U:%G:%a $BOSH_INSTALL_TARGET > /var/vcap/packages/library/owner"
    source = release(tmp_path / "in.tgz", library=(script, []))
    (box.root / "tmp/in.tgz").write_bytes(source.read_bytes())
    box.run("mkdir -p /var/vcap/bosh/etc; printf 1.234 > /var/vcap/bosh/etc/stemcell_version; rm -f /etc/os-release")
    box.run("printf 'ID=ubuntu\\nVERSION_CODENAME=noble\\n' > /etc/os-release")
    box.run(f"cd {CODE}; exec {sys.executable} -c {shlex.quote(CALL)} compile -output-directory=/tmp/out /tmp/in.tgz")

    with tarfile.open(box.root / "tmp/out/small-1.10-ubuntu-noble-1.234.tgz") as packed:
        file, blob = packed.extractfile("./release.MF"), packed.extractfile("./compiled_packages/library.tgz")
        assert file is not None
        manifest = release_tarball.parse_manifest(file.read())
        with tarfile.open(fileobj=blob) as package:
            owner = package.extractfile("./owner")
            assert owner is not None
            assert owner.read() == b"root:vcap:755\n"
    assert [package.stemcell for package in manifest.compiled_packages] == ["ubuntu-noble/1.234"]
    assert box.run("ls -A /var/vcap/packages /var/vcap/data/compile").split() == [
        "/var/vcap/data/compile:",
        "/var/vcap/packages:",
    ]
