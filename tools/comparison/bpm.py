"""A stand-in for bpm under the Go agent.

It sets up the directories, the user, the session, the environment, the open-file limit and the pidfile, and sends the
same signals as bpm, but it creates no container.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import yaml

VCAP: Final = Path("/var/vcap")
RUNNING: Final = Path("/run/bpm")
"""Directory in which this program records the running processes. Like runc's state, it is independent of the
pidfiles.
"""
TERM_TIMEOUT_S: Final = 15
QUIT_TIMEOUT_S: Final = 2


def main() -> int:
    """Run the subcommand that the arguments name, and return its exit code."""
    words = sys.argv[1:]
    command = words.pop(0) if words else ""
    process = ""
    if "-p" in words:
        at = words.index("-p")
        process = words[at + 1]
        del words[at : at + 2]
    if command == "version":
        print("[DEV BUILD]")
        return 0
    if command == "list":
        return _list()
    job = words[0] if words else ""
    process = process or job
    known = _processes(job)
    if command == "stop" and process not in known:
        return 0
    if process not in known:
        print(f"Error: invalid process: {process}", file=sys.stderr)
        return 1
    pidfile = RUNNING / f"{job}.{process}"
    told = VCAP / "sys/run/bpm" / job / f"{process}.pid"
    if command == "start":
        return 0 if _alive(pidfile) else _start(job, process, known[process], (pidfile, told))
    if command == "stop":
        told.unlink(missing_ok=True)
        return _stop(known[process], pidfile)
    if command == "pid":
        if not _alive(pidfile):
            print("Error: process is not running or could not be found", file=sys.stderr)
            return 1
        print(_alive(pidfile))
        return 0
    print(f"Error: this stand-in has no {command}", file=sys.stderr)
    return 1


def _processes(job: str) -> dict[str, Any]:
    place = VCAP / "jobs" / job / "config/bpm.yml"
    if not place.exists():
        return {}
    return {one["name"]: one for one in (yaml.safe_load(place.read_text()) or {}).get("processes", [])}


def _alive(pidfile: Path) -> int:
    """Return the pid in a pidfile if that process is running, otherwise 0."""
    try:
        pid = int(pidfile.read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return 0
    return pid if state != "Z" else 0


def _start(job: str, process: str, config: dict[str, Any], pidfiles: tuple[Path, ...]) -> int:
    log, data = VCAP / "sys/log" / job, VCAP / "data" / job
    places = [log, VCAP / "sys/run" / job, data / "tmp"]
    places += [data] if config.get("ephemeral_disk") else []
    places += [VCAP / "store" / job] if config.get("persistent_disk") else []
    volumes = [Path(one["path"]) for one in config.get("additional_volumes") or [] if not one.get("mount_only")]
    for place in (*places, *volumes):
        place.mkdir(0o700, parents=True, exist_ok=True)
        if place in volumes and place.is_dir():
            place.chmod(0o700)
        os.chown(place, 1000, 1000)
    hook = (config.get("hooks") or {}).get("pre_start")
    names = [log / f"{process}.{stream}.log" for stream in ("stdout", "stderr")]
    for name in names:
        name.touch(0o600)
        os.chown(name, 1000, 1000)
    environment = {
        "TMPDIR": str(data / "tmp"),
        "LANG": "en_US.UTF-8",
        "PATH": f"{VCAP}/bosh/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(data),
    }
    environment |= {str(name): str(value) for name, value in (config.get("env") or {}).items()}
    user = 0 if (config.get("unsafe") or {}).get("privileged") else 1000
    with names[0].open("ab") as out, names[1].open("ab") as err:
        if hook and subprocess.run([hook], env=environment, stdout=out, stderr=err, check=False).returncode:
            print(f"Error: failed to start job-process: prestart hook failed: {hook}", file=sys.stderr)
            return 1
        if files := (config.get("limits") or {}).get("open_files"):
            most = min(int(files), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        started = subprocess.Popen(
            [config["executable"], *map(str, config.get("args") or [])],
            cwd=config.get("workdir") or str(VCAP / "jobs" / job),
            env=environment | {"BPM_STAND_IN": process},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=[],
        )
    for pidfile in pidfiles:
        pidfile.parent.mkdir(parents=True, exist_ok=True)
        pidfile.write_text(str(started.pid))
    return 0


def _stop(config: dict[str, Any], pidfile: Path) -> int:
    first = getattr(signal, f"SIG{config.get('shutdown_signal') or 'TERM'}")
    for number, patience in (
        (first, TERM_TIMEOUT_S),
        (signal.SIGQUIT, QUIT_TIMEOUT_S),
        (signal.SIGKILL, QUIT_TIMEOUT_S),
    ):
        if pid := _alive(pidfile):
            os.kill(pid, number)
            give_up_at = time.monotonic() + patience
            while _alive(pidfile) and time.monotonic() < give_up_at:
                time.sleep(0.05)
    pidfile.unlink(missing_ok=True)
    return 0


def _list() -> int:
    print("Name  Pid  Status")
    for place in sorted((VCAP / "jobs").glob("*/config/bpm.yml")):
        job = place.parts[-3]
        for process in _processes(job):
            pid = _alive(RUNNING / f"{job}.{process}")
            name = job if process == job else f"{job}:{process}"
            print(json.dumps([name, pid or "-", "running" if pid else "stopped"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
