"""Tests jobs that expect ``/var/vcap`` although the agent has another base directory.

The agent is tested as root and as an ordinary user, with and without an existing ``/var/vcap``, and without permission
to create a mount namespace.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from tests.support.jobs import sleeper

pytestmark = pytest.mark.root

AS_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
WITHOUT_VCAP = """
set -e
share() { mkdir "$copy/$1" && mount --rbind "/var/$1" "$copy/$1"; }
copy=$(mktemp -d)
mount -t tmpfs copy "$copy"
for entry in /var/*; do
    case $entry in
        /var/vcap) ;;
        *) if [ -L "$entry" ]; then cp -a "$entry" "$copy"; else share "${entry#/var/}"; fi ;;
    esac
done
mount --move "$copy" /var
! [ -e /var/vcap ]
exec "$@"
"""
BPM_MONIT = """check process web with pidfile /var/vcap/sys/run/bpm/web/web.pid
  start program "{bpm} start web"
  stop program "{bpm} stop web"
  group vcap
"""
NONE_LEFT = 'echo 0 >/proc/sys/user/max_mnt_namespaces; exec "$@"'
PREFIXES = {
    "root": [],
    "user": AS_USER,
    "without": ["unshare", "--mount", "bash", "-c", WITHOUT_VCAP, "bash"],
    "user without": ["unshare", "--mount", "bash", "-c", WITHOUT_VCAP, "bash", *AS_USER],
}


@contextmanager
def agent(where: Path, prefix: list[str], job: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Run an agent without a Director and with one job that uses ``/var/vcap``. Yield its base directory."""
    for name, text in (job or sleeper(Paths(), "web")).items():
        path = where / "rendered/jobs/web" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))
    config = where / "agent.json"
    config.write_text(json.dumps({"AgentShim": {"http": "off", "spec": str(where / "rendered")}}))
    tree = where / "vcap"
    argv = [*prefix, sys.executable, "-m", "agent_shim", "run", "-C", str(config), "-b", str(tree), "--log-format=text"]
    with (where / "log").open("w") as log, subprocess.Popen(argv, stdout=log, stderr=log) as started:
        try:
            yield tree
        finally:
            command("drain", tree, "--timeout", "5")
            started.terminate()


def listed() -> list[Path] | None:
    return sorted(Path("/var/vcap").iterdir()) if Path("/var/vcap").is_dir() else None


def command(word: str, tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "agent_shim", word, "-b", str(tree), *words]
    return subprocess.run(argv, capture_output=True, text=True)


def wait_for_phase(tree: Path, phase: str) -> dict[str, object]:
    """Wait until the job is in ``phase``, and return its entry in the output of ``status --json``."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done = command("status", tree, "--json")
        found = json.loads(done.stdout)["processes"] if done.returncode == 0 else []
        if found and found[0]["phase"] == phase:
            line: dict[str, object] = found[0]
            return line
        time.sleep(0.1)
    raise AssertionError(f"the job is not {phase}: {done}\n{(tree.parent / 'log').read_text()}")


@pytest.mark.parametrize("kind", PREFIXES)
def test_jobs_find_the_agents_base_directory_at_var_vcap(tmp_path: Path, kind: str) -> None:
    before = listed()
    tmp_path.chmod(0o777)
    with agent(tmp_path, PREFIXES[kind]) as tree:
        pid = wait_for_phase(tree, "running")["pid"]

        assert (tree / "sys/run/web/web.pid").read_text().strip() == str(pid)
        assert "jobs that name /var/vcap" not in (tmp_path / "log").read_text()
        assert not (tree / ".parent").exists()
        if "user" in kind:
            (line,) = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("CapEff")]
            assert int(line.split()[1], 16) == 0
    assert listed() == before


def test_isolated_bpm_process_finds_its_job_at_var_vcap(tmp_path: Path) -> None:
    monit = BPM_MONIT.format(bpm="/var/vcap/jobs/bpm/bin/bpm")
    config = "processes: [{name: web, executable: /var/vcap/jobs/web/bin/run}]"
    run = "#!/bin/sh\necho here >/var/vcap/sys/log/web/own && exec sleep 1000\n"
    with agent(tmp_path, [], {"monit": monit, "config/bpm.yml": config, "bin/run": run}) as tree:
        wait_for_phase(tree, "running")

        assert (tree / "sys/log/web/own").read_text() == "here\n"


def test_first_log_line_explains_why_there_is_no_mount_namespace(tmp_path: Path) -> None:
    with agent(tmp_path, ["unshare", "--user", "--map-root-user", "bash", "-c", NONE_LEFT, "bash"]) as tree:
        wait_for_phase(tree, "down")
        first = (tmp_path / "log").read_text().splitlines()[0]

    assert "jobs do not see the agent's directories at /var/vcap: cannot leave the mount namespace" in first
