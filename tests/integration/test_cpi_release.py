"""Installs the CPI's BOSH release, renders its job and calls the CPI, as a Director and ``bosh create-env`` do."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kubernetes_cpi import config
from kubernetes_cpi.config import Config
from tools.cpi_release import release

pytestmark = pytest.mark.slow

RENDER: Final = """
require "erb"
require "json"

class Context
  def initialize(properties) = @properties = properties
  def p(name) = found(name) || raise("unknown property #{name}")
  def if_p(*names) = (values = names.map { |name| found(name) }).any?(&:nil?) ? nil : yield(*values)
  def bind = binding
  private def found(name) = name.split(".").reduce(@properties) { |at, key| at && at[key] }
end

template, properties = ARGV
puts ERB.new(File.read(template), trim_mode: "-").result(Context.new(JSON.parse(properties)).bind)
"""
"""A ruby program that renders templates. Of bosh-template, it has only ``p`` and ``if_p``, because the templates use
nothing else.
"""
BARE: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


@dataclass(frozen=True)
class Installed:
    """An installed release, with its manifest, its job's spec, and the job, package and template directories."""

    manifest: dict[str, Any]
    job: dict[str, Any]
    jobs: Path
    packages: Path
    templates: Path

    def render(self, properties: Mapping[str, Any]) -> None:
        """Render the job with ``properties`` and the defaults, as the Director does."""
        if shutil.which("ruby") is None:
            pytest.fail("ruby is missing: apt-get install --no-install-recommends ruby")
        document: dict[str, Any] = {}
        given = {name: spec["default"] for name, spec in self.job["properties"].items() if "default" in spec}
        for name, value in {**given, **properties}.items():
            at = document
            *above, last = name.split(".")
            for key in above:
                at = at.setdefault(key, {})
            at[last] = value
        for template, place in self.job["templates"].items():
            command = ["ruby", "-e", RENDER, str(self.templates / template), json.dumps(document)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            path = self.jobs / "kubernetes_cpi" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if "bin/" in place else 0o640)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call ``bin/cpi`` with the two variables in which create-env passes directories. Return the response."""
        request = {"method": method, "arguments": arguments, "context": {"director_uuid": "d", "request_id": "cpi-1"}}
        environment = {**BARE, "BOSH_PACKAGES_DIR": str(self.packages), "BOSH_JOBS_DIR": str(self.jobs)}
        done = subprocess.run(
            [self.jobs / "kubernetes_cpi/bin/cpi"],
            input=json.dumps(request),
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tarball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.release("1.2.3", tmp_path_factory.mktemp("dist"))


@pytest.fixture
def installed(tarball: Path, tmp_path: Path) -> Installed:
    """Unpack and compile the release without a network and without the test's environment variables."""
    unpacked, job, source, packages = (tmp_path / name for name in ("release", "job", "source", "packages"))
    _unpack(tarball.read_bytes(), unpacked)
    _unpack((unpacked / "jobs/kubernetes_cpi.tgz").read_bytes(), job)
    _unpack((unpacked / "packages/kubernetes_cpi.tgz").read_bytes(), source)
    target = packages / "kubernetes_cpi"
    target.mkdir(parents=True)
    done = subprocess.run(
        ["bash", "-x", "packaging"],
        cwd=source,
        env={**BARE, "BOSH_INSTALL_TARGET": str(target), "BOSH_COMPILE_TARGET": str(source)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    manifest = yaml.safe_load((unpacked / "release.MF").read_text())
    spec = yaml.safe_load((job / "job.MF").read_text())
    assert (job / "monit").read_bytes() == b""
    return Installed(manifest, spec, tmp_path / "jobs", packages, job / "templates")


def _unpack(content: bytes, target: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(target, filter="tar")


def test_released_cpi_answers_info_in_an_empty_environment(installed: Installed) -> None:
    """With no job properties set, the rendered cpi.json must be equivalent to the CPI's built-in defaults."""
    installed.render({})
    response = installed.call("info")

    assert response["error"] is None
    assert response["result"]["api_version"] == 3
    assert "kubernetes-light" in response["result"]["stemcell_formats"]
    assert config.load(installed.jobs / "kubernetes_cpi/config/cpi.json", {}) == Config()
    assert all(spec["description"] for spec in installed.job["properties"].values())


def test_cpi_job_properties_reach_the_cpi(installed: Installed) -> None:
    """The local blobstore, which bosh-deployment sets for every CPI, is passed on to agents. An agent created by
    create-env installs the blobs that the CLI has uploaded there.
    """
    file = installed.jobs / "kubernetes_cpi/config/cpi.json"
    installed.render(
        {
            "agent.mbus": "nats://10.0.0.6:4222",
            "blobstore.provider": "local",
            "blobstore.path": "/var/vcap/micro_bosh/data/cache",
            "kubernetes_cpi.cluster.server": "https://127.0.0.1:1",
            "kubernetes_cpi.cluster.token": "t",
            "kubernetes_cpi.namespace": "bosh",
            "kubernetes_cpi.vms": {"tier": "restricted"},
        }
    )
    found = json.loads(file.read_text())
    assert found["agent"]["mbus"] == "nats://10.0.0.6:4222"
    assert found["vms"] == {"tier": "restricted"}
    assert found["cluster"]["server"] == "https://127.0.0.1:1"
    local = {"provider": "local", "options": {"blobstore_path": "/var/vcap/micro_bosh/data/cache"}}
    assert found["agent"]["blobstore"] == local
    arguments = {"cpu": 1, "ram": 512, "ephemeral_disk_size": 1024}
    assert installed.call("calculate_vm_cloud_properties", arguments)["result"]

    given = {"provider": "dav", "options": {"endpoint": "https://10.0.0.6:25250"}}
    installed.render({"blobstore.provider": "local", "kubernetes_cpi.agent.blobstore": given})
    assert json.loads(file.read_text())["agent"]["blobstore"] == given


def test_cpi_release_loads_shared_libraries_only_from_itself_or_the_system(installed: Installed) -> None:
    python = installed.packages / "kubernetes_cpi/python"
    programs = [path for path in python.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
    said = subprocess.run(["ldd", *programs], env=BARE, capture_output=True, text=True).stdout
    found = re.findall(r"=> (/\S+|not found)", said)

    assert found
    assert [path for path in found if not path.startswith((str(python), "/lib", "/usr/lib"))] == []


def test_cpi_release_digests_match_their_files(tarball: Path, tmp_path: Path, installed: Installed) -> None:
    for kind in ("jobs", "packages"):
        (entry,) = installed.manifest[kind]
        content = (tmp_path / "release" / kind / f"{entry['name']}.tgz").read_bytes()
        assert entry["sha1"] == f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_cpi_release_builds_are_reproducible(tarball: Path, tmp_path: Path) -> None:
    again = release.release("1.2.3", tmp_path)

    assert again.read_bytes() == tarball.read_bytes()
