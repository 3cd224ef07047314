"""``agent-shim try`` runs a source release in a container."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.pods import Podman

pytestmark = pytest.mark.image

PACKAGING = "mkdir $BOSH_INSTALL_TARGET/bin && cp web $BOSH_INSTALL_TARGET/bin/web\n"
SPEC = "{name: web, packages: [web], templates: {bpm.erb: config/bpm.yml}, properties: {seconds: {default: 9999}}}"
BPM = """
processes:
- name: web
  executable: /var/vcap/packages/web/bin/web
  args: ["<%= p('seconds') %>"]
"""
MONIT = """
check process web with pidfile /var/vcap/sys/run/bpm/web/web.pid
  start program "/var/vcap/jobs/bpm/bin/bpm start web"
  stop program "/var/vcap/jobs/bpm/bin/bpm stop web"
  group vcap
"""
ERRAND = "{name: check, templates: {run: bin/run}}"


def packed(files: dict[str, str | bytes]) -> bytes:
    """Return a gzipped tarball of ``files``."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(f"./{name}")
            member.size, member.mode = len(data), 0o755
            tar.addfile(member, io.BytesIO(data))
    return whole.getvalue()


def release(where: Path, spec: str = SPEC) -> Path:
    """Create a source release with a service and an errand, and return the path of its tarball."""
    package = packed({"packaging": PACKAGING, "web": "#!/bin/sh\nexec sleep $1\n"})
    (where / "package").write_bytes(package)
    digest = subprocess.run(["sha1sum", where / "package"], capture_output=True, text=True, check=True).stdout.split()[
        0
    ]
    part = f"version: '1', fingerprint: '1', sha1: {digest}"
    manifest = f"name: tiny\nversion: '1'\npackages: [{{name: web, {part}, dependencies: []}}]\n"
    jobs: dict[str, dict[str, str | bytes]] = {
        "web": {"job.MF": spec, "monit": MONIT, "templates/bpm.erb": BPM},
        "check": {"job.MF": ERRAND, "monit": "", "templates/run": "#!/bin/sh\n"},
    }
    files: dict[str, str | bytes] = {f"jobs/{name}.tgz": packed(job) for name, job in jobs.items()}
    (where / "tiny.tgz").write_bytes(packed({"release.MF": manifest, **files, "packages/web.tgz": package}))
    return where / "tiny.tgz"


@pytest.mark.timeout(1800)
def test_try_command_runs_a_source_release(podman: Podman, image: str, tmp_path: Path) -> None:
    name = f"agent-shim-test-try-{os.getpid()}"
    argv = ["-m", "agent_shim", "try", str(release(tmp_path)), "--image", image, "--name", name, "--tool", "podman"]
    environment = {**os.environ, "CONTAINERS_CONF": str(podman.config)}
    try:
        done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environment)
    finally:
        podman.run("rm", "--force", "--volumes", name)

    assert done.returncode == 0, done.stderr
    assert "leave out errands: check" in done.stderr
    assert "job state  running" in done.stdout
    assert "disk       mounted" in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines()][-1] == ["web", "running"]


def test_try_command_reports_a_missing_property_before_compiling(podman: Podman, image: str, tmp_path: Path) -> None:
    tarball = release(tmp_path, SPEC.replace("default: 9999", ""))
    argv = ["-m", "agent_shim", "try", str(tarball), "--image", image, "--tool", "podman"]
    environment = {**os.environ, "CONTAINERS_CONF": str(podman.config)}
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environment)

    assert done.returncode == 78
    assert "cannot render web/templates/bpm.erb:5: there is no property seconds\n" in done.stderr
    assert "compile" not in done.stderr
