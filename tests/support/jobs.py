"""Creates jobs and packages for tests, stores them in the local blobstore, and builds the spec that refers to them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_shim.core.paths import Paths
from agent_shim.demo.release import archive

NETWORKS = {"default": {"type": "manual", "ip": "10.0.0.5", "netmask": "255.255.255.0", "prefix": "32"}}


def blob(store: Path, content: bytes, name: str = "") -> dict[str, str]:
    """Store ``content`` in a local blobstore. Return the blob's id and digest in the form that a spec uses."""
    digest = hashlib.sha1(content).hexdigest()
    blob_id = name or f"blob-{digest[:8]}"
    store.mkdir(parents=True, exist_ok=True)
    (store / blob_id).write_bytes(content)
    return {"blobstore_id": blob_id, "sha1": digest}


def spec(
    store: Path,
    jobs: Mapping[str, Mapping[str, str | bytes]],
    packages: Mapping[str, Mapping[str, str | bytes]] | None = None,
    *,
    version: str = "1",
    **members: Any,
) -> dict[str, Any]:
    """Store jobs and packages in the blobstore, and return an apply spec for them.

    ``jobs`` and ``packages`` map each name to a mapping of file paths to contents.
    """
    files = {f"{job}/{path}": text for job, content in jobs.items() for path, text in content.items()}
    templates = [{"name": name, "version": version} for name in jobs]
    first = next(iter(jobs), "")
    return {
        "deployment": "dep",
        "job": {"name": "group", "template": first, "version": version, "templates": templates},
        "index": 0,
        "name": "group",
        "id": "instance-id",
        "az": "z1",
        "networks": NETWORKS,
        "packages": {
            name: {"name": name, "version": version, **blob(store, archive(content))}
            for name, content in (packages or {}).items()
        },
        "configuration_hash": f"hash-{version}",
        "persistent_disk": 0,
        "rendered_templates_archive": blob(store, archive(files)),
    } | members


def monit(name: str, pidfile: Path, start: str, stop: str, within: str = "") -> str:
    """Return a monit file with one process. ``within`` is inserted after the start program."""
    return f"""check process {name}
  with pidfile {pidfile}
  start program "{start}" {within}
  stop program "{stop}"
  group vcap
"""


def process(paths: Paths, job: str, start: str, stop: str = "kill $(cat $pidfile)", within: str = "") -> dict[str, str]:
    """Return the files of a job with one process.

    ``start`` and ``stop`` are shell scripts in which ``$pidfile`` is set.
    """
    pidfile = paths.run / job / f"{job}.pid"
    ctl = paths.jobs / job / "bin/ctl"
    script = f"#!/bin/sh\npidfile={pidfile}\ncase $1 in\nstart)\n{start}\n;;\nstop)\n{stop}\n;;\nesac\n"
    return {"monit": monit(job, pidfile, f"{ctl} start", f"{ctl} stop", within), "bin/ctl": script}


def of_bpm(paths: Paths, job: str, config: str) -> dict[str, str]:
    """Return the files of a job whose only process has the job's name and is run by bpm."""
    bpm = paths.jobs / "bpm/bin/bpm"
    pidfile = paths.run / "bpm" / job / f"{job}.pid"
    return {"monit": monit(job, pidfile, f"{bpm} start {job}", f"{bpm} stop {job}"), "config/bpm.yml": config}


def sleeper(paths: Paths, job: str) -> dict[str, str]:
    """Return the files of a job with one process that sleeps."""
    return process(paths, job, "echo $$ > $pidfile; exec sleep 1000", "kill $(cat $pidfile); rm -f $pidfile")
