"""Checks the invariants after each chaos case.

``remember`` records the reference state before the fault, and ``broken`` returns the violated invariants. ``Witness``
does not rely on pidfiles or on the agent's replies. It examines the bus, the blobs of the applied spec, the process
table and the mount table. Each case declares the effects of its fault (``Stand.involved``, ``told``, ``failing``,
``lasting``, ``moved``). Everything else must be the same as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from agent_shim.core.paths import Paths
from agent_shim.demo.director import RpcRemoteError, RpcTimeoutError
from agent_shim.demo.release import archive
from agent_shim.host import proc
from tests.support.instance import AGENT

if TYPE_CHECKING:
    from tests.support.stand import Stand

CANARY: Final = "canary-7f3a9c"
"""A secret in the settings. It may appear only in files that other users cannot read."""
LOG_GROWTH_BYTES: Final = 1 << 20
AUDIT_BYTES: Final = 800
"""Bytes that one request may add to the log. A task causes two audit lines of about 300 bytes each."""
MEMORY: Final = 5 << 20
HALF_MADE: Final = re.compile(r"\.tmp-[0-9a-f]{8}$|\.part$")
"""Pattern for names of unfinished files."""
BUNDLE: Final = re.compile("[0-9a-f]{40}")
"""Pattern for the directory names of installed job and package versions."""
DEAF: Final = 3.0
"""Seconds during which the agent is pinged after a case. Each ping must be answered within ``PONG`` seconds."""
PONG: Final = 1.0
BUSY: Final = 30.0
"""Seconds of pinging after which a late answer is a violation even if the machine is busy."""
SETTLED: Final = 10.0
"""Seconds within which jobs must reach their state, alerts must arrive, and processes that are being stopped must have
exited.
"""
BEAT: Final = 35.0
"""Seconds within which a heartbeat must arrive: the interval of 30 seconds, and five more for a busy machine."""
TASK: Final = 60.0
PLAIN_TEXT: Final = "managed_disk_settings.json"
"""Despite its name, this file contains only a disk cid, so it is not parsed as JSON."""
LARGE: Final = 8 << 20
"""Size in bytes above which the contents of files are not compared, only their sizes."""
LOG: Final = "".join(f"{number} a line of the witness\n" for number in range(3000)).encode()
"""Content of a log file that is written before the fault. The logs fetched after the fault must contain all of it."""
OWN: Final = "bpm"
"""Name of the job and the package that the agent itself provides."""
Identity: TypeAlias = tuple[int, int]
"""Pid and start time of a process."""
Entry: TypeAlias = tuple[int, str]
"""A file's mode and digest. For a symlink, the target replaces the digest. For a directory, the digest is ""."""
PRIVATE_KEY: Final = re.compile(rb"PRIVATE KEY-----(.+?)-----END", re.DOTALL)


@dataclass(frozen=True)
class Size:
    """The agent's resource usage."""

    descriptors: int
    threads: int
    memory: int
    """Resident memory in bytes."""

    def beyond(self, before: Size) -> list[str]:
        """Return the violations of I4: the values that have grown by more than the allowed amount since ``before``."""
        found = []
        if self.descriptors > before.descriptors + 5:
            found.append(f"I4: {self.descriptors} descriptors instead of {before.descriptors}")
        if self.threads > before.threads + 2:
            found.append(f"I4: {self.threads} threads instead of {before.threads}")
        if self.memory > before.memory + MEMORY:
            found.append(f"I4: {self.memory >> 20} MiB of memory instead of {before.memory >> 20} MiB")
        return found


@dataclass(frozen=True)
class Before:
    """The reference state, as it was before the fault."""

    size: Size
    starts: dict[str, list[int]]
    roots: dict[str, Identity]
    """The main process of each job."""
    log_size: int
    asked: int
    """Number of requests that the Director has published."""
    notices: int
    links: int
    """Number of connections through the proxy."""
    mounts: Counter[str]
    applied: Mapping[str, Any] | None
    files: dict[str, Entry]
    modes: dict[str, int]


class Witness:
    """Checks the invariants in one chaos-test environment."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._before: Before | None = None

    def remember(self) -> None:
        """Record the reference state."""
        stand = self._stand
        log = stand.world.base / "data/sys/log/witness/witness.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(LOG)
        self._before = Before(
            size=stand.size(),
            starts=stand.world.starts(),
            roots=self._roots(),
            log_size=self._log(),
            asked=self._published(),
            notices=len(stand.monitor.notices),
            links=stand.proxy.connections,
            mounts=self._mounts(),
            applied=stand.world.applied,
            files=self._deployed(),
            modes=self.modes(),
        )

    def remember_memory(self) -> None:
        """Replace the memory usage in the reference state with the current one."""
        assert self._before is not None
        self._before = replace(self._before, size=replace(self._before.size, memory=self._stand.size().memory))

    async def broken(self) -> list[str]:
        """Return the violated invariants, each with what was observed."""
        stand, before = self._stand, self._before
        if before is None:
            return ["I4: the case never called remember()"]
        found = await self._unanswered_pings()
        found += await self._unfinished_tasks()
        found += await self._grown(before)
        found += await self._zombies()
        found += await self._unfinished_files() + self.documents() + self._talk(before) + self._secrets()
        found += await self._settled()
        found += self._restarted(before)
        found += await self._alerts(before)
        found += self._mounted(before)
        found += await asyncio.to_thread(self.changed, before)
        found += await self._worked()
        if len(stand.ends) != stand.expected_ends:
            found.append(
                f"I1: expected {stand.expected_ends} exits of the agent, but saw {len(stand.ends)}: {stand.ends}"
            )
        found = [one for one in found if one.partition(":")[0] not in stand.omitted]
        return found or [one for one in await self._beats(before) if one.partition(":")[0] not in stand.omitted]

    # --- I2, I11 to I18: what the Director, the Health Monitor and the machine see ------------------------------------

    async def _settled(self) -> list[str]:
        """Wait until jobs and processes are in the requested state. Return the violations of I15 and I16."""
        ends_at, strange = time.monotonic() + SETTLED, set[Identity]()
        while True:
            seen = self._strangers()
            wrong = await self._wrong_states()
            lasting = strange & seen.keys()
            if (not wrong and not seen) or time.monotonic() > ends_at:
                break
            strange = set(seen)
            await asyncio.sleep(0.5)
        names = sorted(seen[one] for one in lasting)
        return wrong + ([f"I15: {len(names)} leftover processes: {', '.join(names[:3])}"] if names else [])

    async def _wrong_states(self) -> list[str]:
        """Compare the jobs in ``get_state`` with the requested states and the running processes (I16)."""
        stand, roots, found = self._stand, self._roots(), list[str]()
        try:
            state = await stand.call("get_state", "full")
        except RpcTimeoutError:
            return ["I16: get_state was not answered"]
        told = {one["name"]: one["state"] for one in state.get("processes", ())}
        lives = {name: name in roots for name in told}
        for name, said in told.items():
            if name in stand.failing:
                found += [f"I16: {name} is reported as running without a process"] * (
                    said == "running" and not lives[name]
                )
            elif {said == "running", lives[name]} != {stand.world.is_started}:
                seen, wanted = "with" if lives[name] else "without", "" if stand.world.is_started else "not "
                found.append(f"I16: {name} is reported as {said} {seen} a process, but should {wanted}run")
        unsaid = sorted(roots.keys() - told)
        found += [f"I16: running jobs are missing from the state: {' '.join(unsaid[:3])}"] * bool(unsaid)
        wanted = "running" if stand.world.is_started else "stopped"
        if told and not stand.failing and state["job_state"] != wanted:
            found.append(f"I16: job_state is {state['job_state']} instead of {wanted}")
        return found

    def _strangers(self) -> dict[Identity, str]:
        """Map each process that jobs have left behind to its command line. Processes of running jobs are left out."""
        table, agent = proc.table(), self._stand.pid
        children = proc.children(table)
        marker = str(self._stand.world.base).encode()
        ours = proc.descent(children, [agent])
        for pid in table:
            with contextlib.suppress(OSError):
                texts = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
                if any(marker in text for text in texts):
                    ours.add(pid)
        above, each = {os.getpid()}, agent
        while each in table:
            above.add(each)
            each = table[each].parent
        roots = self._roots() if self._stand.world.is_started else {}
        known = proc.descent(children, [pid for pid, _ in roots.values()])
        found = {}
        for pid in ours - above - known:
            line = _line(pid)
            if line.startswith("keeper ") and children.get(pid):
                continue  # its descendants are checked separately
            if table[pid].is_alive and line and line not in self._stand.lasting and not _is_helper(line):
                found[table[pid].identity] = line
        return found

    def _roots(self) -> dict[str, Identity]:
        """Return each running job's main process.

        This is the last process that the job's start script has recorded. If that process is not running, the pidfile
        is used instead.
        """
        world, numbers = self._stand.world, self._outside_pids()
        starts = {name: pids[-1] for name, pids in world.starts().items() if pids}
        found = {}
        for pids in (world.pids(), starts):
            for name, pid in pids.items():
                stat = proc.stat(numbers.get(pid, 0) if numbers else pid)
                if stat is not None and stat.is_alive:
                    found[name] = stat.identity
        return found

    def processes(self) -> dict[Identity, str]:
        """Map each job process to its command line."""
        table = proc.table()
        pids = proc.descent(proc.children(table), [pid for pid, _ in self._roots().values()])
        return {table[pid].identity: _line(pid) for pid in pids if pid in table}

    def _outside_pids(self) -> dict[int, int]:
        """Map pids in the agent's PID namespace to pids in this process's namespace. If the two namespaces are the
        same, the map is empty.
        """
        if not self._stand.world.is_apart:
            return {}
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                told = re.search(r"^NSpid:(.*)$", (path / "status").read_text(), re.MULTILINE)
                if told and len(numbers := told[1].split()) > 1:
                    found[int(numbers[-1])] = int(path.name)
        return found

    def _restarted(self, before: Before) -> list[str]:
        """Return a violation of I2 if a job that the case does not involve has been restarted.

        A restarted job has a new main process or another recorded start.
        """
        now, starts = self._roots(), self._stand.world.starts()
        again = {name for name, identity in before.roots.items() if now.get(name, identity) != identity}
        again |= {name for name, pids in starts.items() if pids != before.starts.get(name, pids[:1])}
        again -= self._stand.involved
        return [f"I2: unaffected jobs were restarted: {' '.join(sorted(again)[:5])}"] if again else []

    async def _alerts(self, before: Before) -> list[str]:
        """Compare the alerts with those that the case expects (I12)."""
        stand = self._stand

        def seen() -> tuple[list[str], list[str]]:
            notices = stand.monitor.notices[before.notices :]
            texts = [f"{one.body['title']}, severity {one.body['severity']}" for one in notices if one.kind == "alert"]
            missing = []
            for pattern, times in stand.told.items():
                count = sum(re.search(pattern, text) is not None for text in texts)
                if count < (times or 1) or (times is not None and count > times):
                    missing.append(f"I12: {count} alerts match '{pattern}'" + (f" instead of {times}" if times else ""))
            other = [text for text in texts if not any(re.search(pattern, text) for pattern in stand.told)]
            return missing, [f"I12: unexpected alerts: {', '.join(other[:3])}"] if other else []

        ends_at = time.monotonic() + SETTLED
        while seen()[0] and time.monotonic() < ends_at:
            await asyncio.sleep(0.1)
        missing, other = seen()
        return missing[:3] + other

    def _mounts(self) -> Counter[str]:
        """Count the agent's mounts by mount point, root, type and source. The machine's own mounts are left out."""
        found, ours = Counter[str](), (f"{self._stand.world.scratch}/", "/etc/", "/var/vcap")
        for line in Path(f"/proc/{self._stand.pid}/mountinfo").read_text().splitlines():
            words = line.split()
            after = words.index("-")
            point, source = words[4], words[after + 2]
            if point.startswith(ours):
                found[f"{point}: {source}, {words[after + 1]}, {words[3]}"] += 1
        return found

    def _mounted(self, before: Before) -> list[str]:
        """Compare the mounts with the reference, and with those that the case declares (I14)."""
        wanted, now = self._stand.moved, self._mounts()
        points = Counter(one.partition(":")[0] for one in now.elements())
        found = [
            f"I14: {kind} mount: {one}"
            for kind, these in (("missing", before.mounts - now), ("unexpected", now - before.mounts))
            for one in sorted(these.elements())
            if one.partition(":")[0] not in wanted
        ]
        for point, source in wanted.items():
            if points[point] != 1 or not any(one.startswith(f"{point}: ") and source in one for one in now):
                found.append(f"I14: {source} is not the only mount at {point}")
        return found

    def _deployed(self) -> dict[str, Entry]:
        """Return the deployed files: everything below the job, package and monit directories."""
        base = self._stand.world.base
        found = {}
        for name in ("jobs", "packages", "monit/job", "data/jobs", "data/packages"):
            for path in _walk(base / name):
                with contextlib.suppress(FileNotFoundError):
                    found[str(path.relative_to(base))] = _entry(path)
        return found

    def modes(self) -> dict[str, int]:
        """Return the modes of job and package files, keyed by their paths below the links in ``jobs`` and ``packages``.

        The links' names stay the same after an apply, whereas the directories of the installed versions change.
        """
        base = self._stand.world.base
        return {
            str(path.relative_to(base)): path.lstat().st_mode
            for kind in ("jobs", "packages")
            for top in (base / kind).glob("*/")
            for path in _walk(top.resolve(), top)
        }

    def changed(self, before: Before) -> list[str]:
        """Compare the deployed files with the blobs of the applied spec and with the reference state (I13)."""
        stand, spec = self._stand, self._stand.world.applied
        if spec is None:
            return []
        written = {f"jobs/{path}" for path in stand.written}
        found = []
        for kind, expected in self._blobs(spec).items():
            top = stand.world.base / kind
            there = {path.name for path in top.iterdir()} - {OWN} if top.is_dir() else set()
            if there != expected.keys():
                found.append(
                    f"I13: {kind} are {' '.join(sorted(there)[:5])} instead of {' '.join(sorted(expected)[:5])}"
                )
            for name, files in expected.items():
                if files is None or name not in there:
                    continue
                real = {
                    str(path.relative_to(top / name)): _file_digest(path)
                    for path in _walk((top / name).resolve(), top / name)
                    if (not path.is_dir() or path.is_symlink()) and path.parent != top / name / "packages"
                }
                wrong = [
                    path
                    for path in sorted(real.keys() | files.keys())
                    if real.get(path) != files.get(path) and f"{kind}/{name}/{path}" not in written
                ]
                found += [f"I13: {kind}/{name}/{path} differs from its blob" for path in wrong[:1]]
        modes = self.modes()
        wrong = [path for path, mode in before.modes.items() if modes.get(path, mode) != mode and path not in written]
        found += [f"I13: the mode of {path} has changed" for path in wrong[:1]]
        if spec is before.applied and not found:
            now = self._deployed()
            # Ignore new files below ``data``, because a rejected apply may have installed other bundles there.
            new = {path for path in now.keys() - before.files.keys() if not path.startswith("data/")}
            wrong = sorted(new | {path for path, entry in before.files.items() if now.get(path) != entry})
            wrong = [path for path in wrong if not any(path.endswith(one.partition("/")[2]) for one in stand.written)]
            found += [f"I13: {wrong[0]} and {len(wrong) - 1} other files have changed"] if wrong else []
        return found[:3]

    def _blobs(self, spec: Mapping[str, Any]) -> dict[str, dict[str, dict[str, str] | None]]:
        """Return the files and digests that each job and package should have according to its blob.

        The value for a job or package is None if its blob was too large to keep a copy.
        """
        kept = self._stand.world.kept
        assert kept is not None

        def members(blob: str) -> dict[str, str] | None:
            with contextlib.suppress(FileNotFoundError), tarfile.open(kept / blob) as tar:
                found = {}
                for member in tar:
                    if not member.isdir():
                        path = os.path.normpath(member.name)
                        file = tar.extractfile(member) if member.isreg() or member.islnk() else None
                        content = file.read() if file else b""
                        found[path] = _digest(content, len(content)) if file else ""
                return found
            return None

        templates = members(spec["rendered_templates_archive"]["blobstore_id"])
        jobs: dict[str, dict[str, str] | None] = {}
        for template in spec["job"]["templates"]:
            name, of = template["name"], f"{template['name']}/"
            jobs[name] = templates and {
                path[len(of) :]: what for path, what in templates.items() if path.startswith(of)
            }
        packages = {name: members(package["blobstore_id"]) for name, package in spec["packages"].items()}
        return {"jobs": jobs, "packages": packages}

    async def _worked(self) -> list[str]:
        """Run tasks and check their results and their effect on the metrics (I17)."""
        try:
            async with asyncio.timeout(TASK):
                return await (self._errand() if self._stand.world.applied else self._compiled())
        except (RpcRemoteError, RpcTimeoutError, TimeoutError, OSError) as exc:
            return [f"I17: a task failed: {type(exc).__name__} {exc}"]

    async def _errand(self) -> list[str]:
        stand, found = self._stand, list[str]()
        assert stand.world.applied is not None
        job = stand.world.applied["job"]["templates"][0]["name"]
        program = stand.world.base / "jobs" / job / "bin/run"
        former = program.read_bytes() if program.exists() else None
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho the witness\necho asks >&2\nexit 7\n")
        program.chmod(0o755)
        counter = 'agent_shim_actions_total{method="run_errand",outcome="done"}'
        before = stand.metric(counter)
        try:
            told = await stand.world.director.run(AGENT, "run_errand", job)
        finally:
            program.unlink() if former is None else program.write_bytes(former)
        if told != {"stdout": "the witness\n", "stderr": "asks\n", "exit_code": 7}:
            found.append(f"I17: the reported result of an errand with exit code 7 is {told}")
        ends_at = time.monotonic() + SETTLED
        while (counted := stand.metric(counter) - before) != 1 and time.monotonic() < ends_at:
            await asyncio.sleep(0.2)
        if counted != 1:
            found.append(f"I18: the metrics count {counted:g} errands instead of 1")
        told = await stand.world.director.run(AGENT, "fetch_logs", "job", ["witness/*.log"])
        blob = stand.world.store / told["blobstore_id"]
        content = blob.read_bytes()
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            members = {Path(member.name).name: member for member in tar if member.isreg()}
            file = tar.extractfile(members["witness.log"]) if "witness.log" in members else None
            if file is None or file.read() != LOG:
                found.append(f"I17: a log is missing or incomplete in the archive of {sorted(members)}")
        if hashlib.sha1(content).hexdigest() not in told["sha1"]:
            found.append("I17: the digest of a log archive is wrong")
        if (stand.world.base / "data/sys/log/witness/witness.log").read_bytes() != LOG:
            found.append("I13: a log file has changed")
        blob.unlink()
        return found

    async def _compiled(self) -> list[str]:
        """Compile a package and check the result. Used if no jobs are deployed."""
        stand = self._stand
        source = stand.world.blob("witness", archive({"packaging": "echo compiled > $BOSH_INSTALL_TARGET/witness\n"}))
        told = await stand.world.director.run(
            AGENT, "compile_package", source["blobstore_id"], source["sha1"], "witness", "1", {}
        )
        with tarfile.open(stand.world.store / told["result"]["blobstore_id"]) as tar:
            file = next((tar.extractfile(one) for one in tar if Path(one.name).name == "witness"), None)
            return (
                [] if file and file.read() == b"compiled\n" else ["I17: a compiled package does not contain its file"]
            )

    async def _beats(self, before: Before) -> list[str]:
        """Wait for a heartbeat and compare it with the state (I11). Compare the metrics with what was observed
        (I18).
        """
        stand, count = self._stand, len(self._heartbeats())
        ends_at = time.monotonic() + BEAT
        while len(self._heartbeats()) == count:
            if time.monotonic() > ends_at:
                return [f"I11: no heartbeat within {BEAT:g} s"]
            await asyncio.sleep(0.05)
        beat, state = self._heartbeats()[-1], await stand.call("get_state", "full")
        found = []
        spec = stand.world.applied or {}
        wanted = {
            "deployment": spec.get("deployment", ""),
            "job": spec.get("job", {}).get("name"),
            "index": spec.get("index"),
            "node_id": spec.get("id", ""),
            **({"job_state": state["job_state"]} if not stand.failing else {}),
        }
        for key, value in wanted.items():
            if beat.body[key] != value:
                found.append(f"I11: {key} in a heartbeat is {beat.body[key]!r} instead of {value!r}")
        missing = {"cpu", "mem", "disk", "load"} - beat.body["vitals"].keys()
        found += [f"I11: a heartbeat has no vitals of {' '.join(sorted(missing))}"] if missing else []
        return found + await asyncio.to_thread(self._measured, before, state)

    def _heartbeats(self) -> list[Any]:
        return self._stand.monitor.of("heartbeat", AGENT)

    def _measured(self, before: Before, state: Mapping[str, Any]) -> list[str]:
        """Compare the metrics with what was observed (I18)."""
        stand = self._stand
        beat_at = self._heartbeats()[-1].at  # Read before the scrape, during which the next heartbeat may arrive.
        told = {
            label: float(value)
            for label, _, value in (line.rpartition(" ") for line in stand.scrape().splitlines())
            if not label.startswith("#") and label
        }
        roots = self._roots()
        wanted = {"agent_shim_bus_connected": 1.0, "agent_shim_tasks_running": 0.0, "agent_shim_tasks_waiting": 0.0}
        for one in state.get("processes", ()):
            if one["name"] not in stand.failing:
                wanted[f'agent_shim_process_up{{process="{one["name"]}"}}'] = float(one["name"] in roots)
                wanted[f'agent_shim_process_state{{process="{one["name"]}",state="{one["state"]}"}}'] = 1.0
        found = [
            f"I18: {name} is {told.get(name)} instead of {value:g}"
            for name, value in wanted.items()
            if told.get(name) != value
        ]
        age = told.get("agent_shim_heartbeat_age_seconds", -1.0)
        if not 0 <= age <= time.monotonic() - beat_at + 2:
            found.append(f"I18: the reported age of the last heartbeat is {age:.1f} s")
        return found[:3] + self._counted(before)

    def _counted(self, before: Before) -> list[str]:
        """Compare the alert counter with the number of received alerts, allowing for alerts that arrive during the
        comparison.
        """
        stand = self._stand
        since = stand.restarted_at if stand.ends else 0

        def came() -> int:
            return sum(one.kind == "alert" for one in stand.monitor.notices[since:])

        # An alert that was sent over a dead connection is counted although it is lost.
        may_be_lost = stand.proxy.connections != before.links or bool(stand.ends)
        ends_at, least = time.monotonic() + SETTLED, came()
        while True:
            counted = stand.metric('agent_shim_alerts_total{outcome="sent"}')
            if counted >= least and (may_be_lost or counted <= came()):
                return []
            if time.monotonic() > ends_at:
                return [f"I18: the metrics count {counted:g} alerts, but {least} arrived"]
            time.sleep(0.2)

    # --- invariants I3 to I10 -----------------------------------------------------------------------------------------

    async def _unanswered_pings(self) -> list[str]:
        """Ping for a few seconds so that even a temporary failure to answer is noticed (I3).

        A late answer is excused if threads waited for a CPU for at least half of the time limit, which shows that the
        machine was busy. After such an answer, pinging continues for another second. After 30 seconds, no late answer
        is excused.
        """
        begun_at = time.monotonic()
        ends_at, gives_up_at = begun_at + DEAF, begun_at + BUSY
        while time.monotonic() < ends_at:
            before = self._waits()
            try:
                await self._stand.call("ping", timeout=PONG)
            except RpcTimeoutError:
                waited = longest_waits(before, self._waits())
                if waited < PONG / 2 or time.monotonic() > gives_up_at:
                    return [f"I3: a ping was not answered within a second (threads waited {waited:.1f} s for a CPU)"]
                ends_at += PONG
            await asyncio.sleep(0.05)
        return []

    def _waits(self) -> dict[str, dict[str, float]]:
        """Return how many seconds each thread of the agent, the bus server and this process has waited for a CPU."""
        found: dict[str, dict[str, float]] = {}
        for pid in (self._stand.pid, self._stand.world.server.pid, os.getpid()):
            found[str(pid)] = {}
            with contextlib.suppress(OSError):  # the process or thread has exited
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    found[str(pid)][thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        return found

    async def _grown(self, before: Before) -> list[str]:
        now = self._stand.size()
        for _ in range(60):
            now = self._stand.size()
            if not now.beyond(before.size):
                break
            await asyncio.sleep(1)
        return now.beyond(before.size)

    async def _zombies(self) -> list[str]:
        def dead() -> set[tuple[int, int]]:
            return {s.identity for s in proc.table().values() if s.parent == self._stand.pid and not s.is_alive}

        first = dead()
        if first:
            await asyncio.sleep(5)
        return [f"I5: {len(first & dead())} zombies older than 5 s"] if first & dead() else []

    async def _unfinished_files(self) -> list[str]:
        """Return a violation of I6 if the same unfinished file is found twice, two seconds apart.

        A file that is still being written is found only once, because each write uses a new temporary name.
        """
        if first := self._half_made():
            await asyncio.sleep(2)
        left = first & self._half_made() if first else set()
        return [f"I6: unfinished files were left behind: {' '.join(sorted(map(str, left))[:3])}"] if left else []

    def _half_made(self) -> set[Path]:
        base, tmp = self._stand.world.base, self._stand.world.base / "data/tmp"
        places = [base / name for name in ("bosh", "jobs", "packages", "instance", "monit")]
        places += [base / "data" / name for name in ("bosh", "jobs", "packages", "blobs", "sensitive_blobs", "compile")]
        left = {path for place in places for path in _walk(place) if HALF_MADE.search(path.name)}
        kept = ("errand-",)  # Errand output that is too long for a reply is kept until the next errand.
        left |= self._strays()
        return left | {
            path for path in _walk(tmp) if not path.is_dir() and not path.relative_to(tmp).parts[0].startswith(kept)
        }

    def _strays(self) -> set[Path]:
        """Return the files in the job and package directories that are neither an installed version nor a link to a
        version.
        """
        base, found = self._stand.world.base, set[Path]()
        for kind in ("jobs", "packages"):
            found |= {path for path in (base / "data" / kind).glob("*/*") if not BUNDLE.fullmatch(path.name)}
            found |= {path for path in (base / kind).glob("*") if not path.exists()}
        return found

    def documents(self) -> list[str]:
        """Return the state files with incomplete or invalid content (I7)."""
        base, found = self._stand.world.base, []
        places = (base / "bosh", base / "data/bosh", base / "instance", Paths(base).shim_run)
        for path in (path for place in places for path in _walk(place) if path.suffix == ".json"):
            try:
                content = path.read_bytes()
                if path.name != PLAIN_TEXT:
                    json.loads(content)
                elif content.split() != [content.strip()]:
                    found.append(f"I7: {path} does not contain a single disk cid")
            except ValueError:
                found.append(f"I7: {path} is not valid JSON")
            except FileNotFoundError:
                continue
        return found

    async def _unfinished_tasks(self) -> list[str]:
        """Wait up to a minute for earlier requests' tasks to finish. Return a violation of I8 if a task is still
        running.
        """
        running: float | None = None
        for _ in range(60):
            running = self._stand.read_metric("agent_shim_tasks_running")
            if running == 0:
                return []
            await asyncio.sleep(1)
        if running is None:
            return ["I8: the metrics do not report how many tasks run"]
        return ["I8: a task is still reported as running after a minute"]

    def _talk(self, before: Before) -> list[str]:
        grown, asked = self._log() - before.log_size, self._published() - before.asked
        if grown > LOG_GROWTH_BYTES + AUDIT_BYTES * asked:
            return [f"I9: the agent's log grew by {grown >> 10} KiB during {asked} requests"]
        return []

    def _secrets(self) -> list[str]:
        secrets, found = self.secrets(), list[str]()

        def look(content: bytes, place: str) -> None:
            found.extend(f"I10: {name} is in {place}" for name, secret in secrets.items() if secret in content)

        look((self._stand.world.scratch / "agent.log").read_bytes(), "the log")
        metrics = self._stand.scrape()
        if not metrics:
            found.append("I10: the metrics cannot be fetched, so they were not searched for secrets")
        look(metrics.encode(), "the metrics")
        for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
            for place in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    if pid != os.getpid():
                        look(Path(f"/proc/{pid}/{place}").read_bytes(), f"the {place} of process {pid}")
        for path in _walk(self._stand.world.base):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o044:
                    look(path.read_bytes(), f"{path}, which others can read")
        return found

    def secrets(self) -> dict[str, bytes]:
        """Return the secrets in use, keyed by name: the canary in the settings, and the agent's private keys."""
        keys = {f"a private key for the bus ({number})": key for number, key in enumerate(sorted(self._keys()))}
        return {"a secret in the settings": CANARY.encode(), **keys}

    def _keys(self) -> set[bytes]:
        """Return the longest line of each private key. A single line looks the same in PEM, in JSON and in a log, so it
        can be searched for everywhere.
        """
        keys = set()
        for path in (
            self._stand.world.source,
            Paths(self._stand.world.base).update_settings,
            Paths(self._stand.world.base).former_mbus,
        ):
            with contextlib.suppress(FileNotFoundError):
                for body in PRIVATE_KEY.findall(path.read_bytes().replace(rb"\n", b"\n")):
                    keys.add(max(body.split(), key=len))
        return keys

    def _published(self) -> int:
        peer = self._stand.world.director.peer
        return peer.published if peer is not None else 0

    def _log(self) -> int:
        """Return the size of the agent's log in bytes."""
        return (self._stand.world.scratch / "agent.log").stat().st_size


def longest_waits(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> float:
    """Return the sum of all processes' longest CPU waits between two readings, in seconds.

    A process's longest wait is that of the thread that waited longest.
    """
    return sum(
        max((seconds - before.get(pid, {}).get(thread, 0.0) for thread, seconds in threads.items()), default=0.0)
        for pid, threads in after.items()
    )


def _walk(top: Path, shown: Path | None = None) -> Iterator[Path]:
    """Yield the paths of everything below ``top``, without following links. If ``shown`` is given, the paths begin with
    it instead of ``top``.
    """
    for here, directories, names in os.walk(top):
        for name in (*directories, *names):
            path = Path(here, name)
            yield path if shown is None else shown / path.relative_to(top)


def _line(pid: int) -> str:
    """Return the command line of a process, or "" if it has none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _is_helper(line: str) -> bool:
    """Return True for the command line of one of the agent's own short-lived programs."""
    return "agent_shim.bulk.worker" in line or "agent_shim.host." in line


def _digest(content: bytes, size: int) -> str:
    return f"{size} {hashlib.sha256(content).hexdigest() if size <= LARGE else ''}"


def _file_digest(path: Path) -> str:
    """Return the digest of a regular file, or "" for other files."""
    if path.is_symlink() or not path.is_file():
        return ""
    size = path.stat().st_size
    return _digest(path.read_bytes() if size <= LARGE else b"", size)


def _entry(path: Path) -> Entry:
    mode = path.lstat().st_mode
    return mode, str(path.readlink()) if path.is_symlink() else _file_digest(path)
