"""Tests ``./dev try-kubernetes``, with programs such as kind, kubectl and bosh replaced by stand-ins that record the
calls.

Of the bosh commands, only ``bosh int`` prints anything that the trial uses. In the daily tests, a stand-in
replaces ``./dev`` as well, because building the CPI release takes a long time.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubernetes_cpi import schema
from kubernetes_cpi.config import Config
from kubernetes_cpi.properties import VmProperties
from tests.support.source import ROOT

DIGEST = f"sha256:{'a' * 64}"
IMAGE = "localhost/agent-shim/trial:latest"
BOSH = {
    "releases": [
        {"name": "bosh", "url": "https://example.org/bosh-283.1.6-ubuntu-noble-1.484.tgz", "version": "283.1.6"},
        {"name": "bpm", "url": "https://example.org/bpm-1.4.38-ubuntu-noble-1.484.tgz", "version": "1.4.38"},
    ]
}
JOB = {"name": "bosh-dns", "properties": {"configure_systemd_resolved": True}}
DNS = {"addons": [{"name": "bosh-dns", "jobs": [JOB]}], "variables": [{"name": "/dns_api_tls_ca"}]}
PROGRAM = f"""#!{sys.executable} -I
import json, os, sys
from pathlib import Path
name, state = Path(sys.argv[0]).name, Path(os.environ["STATE"])
with state.with_name("calls").open("a") as calls:
    calls.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
if os.environ.get("FAILS", "nothing fails") in " ".join(sys.argv):
    sys.exit(7)
if name == "dev":
    *words, out = sys.argv[1:]
    made = Path(out.removeprefix("--out="), "-".join(words).replace("/", "-") + ".tgz")
    made.touch()
    print(made)
    sys.exit()
said = {{
    "kind get": "",
    "docker inspect": "192.0.2.7",
    "docker exec": "REF TYPE DIGEST\\n{IMAGE} application/x {DIGEST} 1 -",
    "bosh int": {json.dumps(DNS)!r},
}}
print(said.get(f"{{name}} {{sys.argv[1]}}", ""))
if sys.argv[1] == "create-env":
    (state / "creds.yml").write_text("admin_password: secret-of-admin\\ndirector_ssl: {{ca: CA}}\\n")
if sys.argv[1:3] == ["create", "cluster"]:
    (state / "kubeconfig").write_text("{{}}")
"""
RECORDED = """
import sys
from tools.trial import __main__ as trial
from tools.trial.running import Runner
run = Runner.__call__
Runner.__call__ = lambda *words, **options: run(*("dev" if word == "./dev" else word for word in words), **options)
sys.exit(trial.main(sys.argv[1:]))
"""
"""A program that runs the trial with the ``dev`` stand-in instead of ``./dev``."""


class TrialRuns:
    """Runs the trial with stand-ins for the programs, and gives access to the calls that they recorded."""

    def __init__(self, where: Path, *, builds: bool = False) -> None:
        """``builds`` says whether ``./dev`` builds the CPI release and the stemcell."""
        self.builds = builds
        self.state = where / "state"
        self.programs = where / "programs"
        self.deployments = where / "bosh-deployment"
        self._calls = where / "calls"
        self.programs.mkdir()
        for name in ("kind", "docker", "kubectl", "bosh", "git", "dev"):
            self.program(name, PROGRAM)
        self.deployments.mkdir()
        (self.deployments / "bosh.yml").write_text(yaml.safe_dump(BOSH))

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    @property
    def command(self) -> list[str]:
        trial = ["-m", "tools.trial"] if self.builds else ["-c", RECORDED]
        return [sys.executable, *trial, f"--state={self.state}", f"--bosh-deployment={self.deployments}"]

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.programs}:{os.environ['PATH']}", "STATE": str(self.state), **more}

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**environment)
        return subprocess.run([*self.command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


@pytest.fixture
def played(tmp_path: Path) -> TrialRuns:
    return TrialRuns(tmp_path)


@pytest.fixture(scope="module", params=["recorded", pytest.param("built", marks=pytest.mark.slow)])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialRuns, str]:
    """Run a complete trial. Return the ``TrialRuns`` object with the recorded calls, and the trial's output."""
    made = TrialRuns(tmp_path_factory.mktemp("trial"), builds=request.param == "built")
    done = made.run()
    assert done.returncode == 0, done.stdout + done.stderr
    return made, done.stdout + done.stderr


def file_of(call: list[str], flag: str) -> list[str]:
    return [call[at + 1] for at, word in enumerate(call) if word == flag]


def test_trial_creates_node_director_and_deployment_in_order(whole: tuple[TrialRuns, str]) -> None:
    played, said = whole

    assert "./dev try-kubernetes --remove" in said
    calls = [call for call in played.calls() if call[0] not in ("docker", "git", "dev")]
    assert [" ".join(call[: 4 if call[1] == "-d" else 3]) for call in calls] == [
        "kind get clusters",
        "kind create cluster",
        "kind load image-archive",
        "kubectl apply -k",
        "kubectl apply -k",
        f"bosh create-env {played.deployments}/bosh.yml",
        "bosh update-cloud-config deploy/cpi/bosh/cloud-config.yml",
        f"bosh int {played.deployments}/runtime-configs/dns.yml",
        "bosh update-runtime-config --name=dns",
        next(" ".join(call[:3]) for call in calls if call[1] == "upload-stemcell"),
        "bosh create-release --force",
        f"bosh upload-release {played.state}/hello.tgz",
        "bosh -d hello deploy",
    ]
    named = [name for call in calls for flag in ("-o", "-k") for name in file_of(call, flag)]
    assert all((ROOT / name).exists() for name in named), named


def test_trial_director_gets_release_stemcell_and_node_address(
    whole: tuple[TrialRuns, str],
) -> None:
    played, said = whole
    (create,) = [call for call in played.calls() if call[1] == "create-env"]
    values = dict(one.split("=", 1) for one in file_of(create, "-v"))
    assert values["internal_ip"] == "192.0.2.7"
    stemcell = Path(values["stemcell"].removeprefix("file://"))
    assert (stemcell.exists(), "1.484" in stemcell.name, "noble" in stemcell.name) == (True, True, True)
    release = Path(values["cpi_release"].removeprefix("file://"))
    assert (release.exists(), release.parent, stemcell.parent) == (True, played.state, played.state)
    assert Path(file_of(create, "--var-file")[0].removeprefix("kubeconfig=")).read_text() == "{}"

    manifest = yaml.safe_load((played.state / "hello.yml").read_text())
    assert BOSH["releases"][1] in manifest["releases"]
    assert manifest["stemcells"][0]["os"] == "ubuntu-noble"
    runtime = yaml.safe_load((played.state / "dns.yml").read_text())
    job = JOB | {"properties": {"configure_systemd_resolved": False, "override_nameserver": True}}
    assert runtime == {"addons": [{"name": "bosh-dns", "jobs": [job]}]}
    assert (played.state / "dns.yml").stat().st_mode & 0o77 == 0
    assert "secret-of-admin" not in said


def test_second_trial_run_keeps_the_node(played: TrialRuns) -> None:
    played.program("kind", PROGRAM.replace('"kind get": ""', '"kind get": "agent-shim-trial"'))

    assert played.run(FAILS="build").returncode == 1
    assert [call[:2] for call in played.calls()] == [["kind", "get"], ["docker", "build"]]


def test_trial_error_names_the_failed_step_and_its_command(played: TrialRuns) -> None:
    done = played.run(FAILS="create cluster")

    assert done.returncode == 1
    assert "kind create cluster" in done.stderr
    assert "ended with 7" in done.stderr


def test_trial_remove_deletes_the_node_and_the_state(played: TrialRuns) -> None:
    played.state.mkdir()

    assert played.run("--remove").returncode == 0
    assert [call[:3] for call in played.calls()] == [["kind", "delete", "cluster"]]
    assert not played.state.exists()


def test_trial_workflow_runs_the_trial_and_fails_if_a_command_fails(played: TrialRuns) -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/trial.yml").read_text())["jobs"]["kind"]["steps"]
    (step,) = [one["run"] for one in steps if "--shell" in one.get("run", "")]
    script = step.replace("./dev try-kubernetes", shlex.join(played.command))
    played.state.mkdir()
    (played.state / "creds.yml").write_text("{admin_password: word, director_ssl: {ca: CA}}")

    def play(**environment: str) -> int:
        argv = ["bash", "-e", "-c", script]
        return subprocess.run(argv, cwd=ROOT, env=played.environment(**environment), capture_output=True).returncode

    assert play() == 0
    assert [call[0] for call in played.calls() if call[0] != "docker"] == ["kubectl"] * 3 + ["bosh"] * 2
    assert play(FAILS="recreate") != 0


def test_trial_names_missing_programs(played: TrialRuns) -> None:
    (played.programs / "bosh").unlink()
    (played.programs / "git").unlink()

    done = played.run(PATH=str(played.programs))

    assert done.returncode == 1
    assert "cannot start without bosh, git" in done.stderr


def read(name: str) -> Any:
    text = (ROOT / "tools/trial/bosh" / name).read_text()
    return yaml.safe_load(text.replace("((internal_ip))", "192.0.2.7").replace("((disk))", "128"))


def test_trial_uses_known_cloud_properties_and_cpi_properties() -> None:
    operations = {one["path"]: one["value"] for name in ("director.yml", "cloud.yml") for one in read(name)}
    for path, value in operations.items():
        if path.endswith("cloud_properties"):
            schema.read(value, VmProperties, origin=path)
    (agent,) = [value for path, value in operations.items() if path.endswith("kubernetes_cpi/agent?")]
    assert schema.read({"agent": agent}, Config, origin="director.yml").agent.mbus == "nats://192.0.2.7:4222"


def test_trial_release_job_renders_to_a_bpm_yml() -> None:
    job = ROOT / "tools/trial/release/jobs/hello"
    spec = yaml.safe_load((job / "spec").read_text())
    assert [job / "templates" / name for name in spec["templates"]] == list((job / "templates").iterdir())
    text = (job / "templates/bpm.yml.erb").read_text().replace('<%= p("greeting").to_json %>', '"hi"')
    (process,) = yaml.safe_load(text)["processes"]
    assert process["args"][1] == "hi"
