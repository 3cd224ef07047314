"""The saboteurs: for each row of the scorecard, a change to the agent that must make the row fail.

Each saboteur breaks exactly what its row tests, not a step that leads up to it. ``./dev lint`` checks that the text to
replace occurs exactly once in its file, and that the expected failure matches one of the case's messages. Without this
check, a change to the agent or to a case could make a saboteur useless without anybody noticing.
"""

from __future__ import annotations

from typing import Final

from tests.chaos.sabotage import RAN, Saboteur

NATS: Final = "agent_shim/edges/bus/nats.py"
LINK: Final = "agent_shim/edges/bus/link.py"
_OF_A_REPLY: Final = '        begun_at, task_id = time.monotonic(), ""\n'
"""The first statement in the agent's function that replies to requests."""

CRASHES: Final = (
    Saboteur(
        "C-02",
        "unpacks a bundle in its final directory, where an incomplete one looks installed",
        "agent_shim/bulk/install.py",
        "    pieces = [Piece(target, files.sibling(Path(target.path))) for target in request.targets]\n"
        "    temps += [piece.temp for piece in pieces]\n",
        "    pieces = [Piece(target, Path(target.path)) for target in request.targets]\n",
        "did not produce the same files",
    ),
    Saboteur(
        "C-03",
        "truncates state files and writes them in place",
        "agent_shim/host/files.py",
        "    try:\n        if not path.is_symlink() and is_mount_point(path):\n            _write_in_place(path, data)\n            return\n",
        "    try:\n        if path.suffix == '.json':\n            path.write_bytes(b'')\n            path.write_bytes(data)\n"
        "            return\n        if not path.is_symlink() and is_mount_point(path):\n            _write_in_place(path, data)\n            return\n",
        "is not valid JSON",
    ),
    Saboteur(
        "C-05",
        "reports a clean stop although a job had to be killed",
        "agent_shim/daemon/orderly_stop.py",
        "if killed := agent.supervisor.killed:",
        "if killed := ():",
        "although a job had to be killed",
    ),
    Saboteur(
        "C-09",
        "exits when one of its parts fails",
        "agent_shim/core/keep_running.py",
        "if is_vital and len(recent) > MAX_FAILURES and now - recent[0] <= FAILURE_PERIOD_S:",
        "if True:",
        "I1:|the agent exited|did not answer a ping|did not count a failure",
    ),
    Saboteur(
        "C-01",
        "forgets the process of each tenth job",
        "agent_shim/supervisor/service.py",
        "            self._finder.resume(self.spec.labels, record.processes)\n            return\n        record.processes = ProcessRecord()\n",
        "            if not self.name.endswith('7'):\n                self._finder.resume(self.spec.labels, record.processes)\n                return\n"
        "            self._finder.look = lambda *_: asyncio.sleep(0, False)\n        record.processes = ProcessRecord()\n",
        "I2:|I16:",
    ),
    Saboteur(
        "C-04",
        "ignores exits that keepers observed before it started",
        "agent_shim/supervisor/ownership/process_finder.py",
        "        if seen := self._keepers.ending_of(record.known):",
        "        if seen := None:",
        "does not report the exit that the keeper observed",
    ),
    Saboteur(
        "C-06",
        "does not remove the sources of a compilation",
        "agent_shim/services/compiler.py",
        "        if self._paths.compile.is_dir():\n            for path in self._paths.compile.iterdir():\n                files.remove_tree(path)\n",
        "        return\n",
        "files of the compilation were left behind|processes of the compilation are still running",
    ),
    Saboteur(
        "C-07",
        "keeps the run directory of the previous container",
        "agent_shim/services/state_backup.py",
        "        _empty(self._paths.run)\n",
        "        pass\n",
        "the run directory of the previous container|not restarted exactly once",
    ),
    Saboteur(
        "C-08",
        "stops the jobs when it is replaced",
        "agent_shim/daemon/main.py",
        "if os.getpid() != 1 or live is None or not live.is_booted:",
        "if live is None or not live.is_booted:",
        "I2:",
    ),
    Saboteur(
        "C-10",
        "starts although another agent is running",
        "agent_shim/services/volume_lease.py",
        "        if _lock(descriptor) is False:\n",
        "        if False:\n",
        "TimeoutExpired|the second agent exited with|does not contain the pid of the first",
    ),
    Saboteur(
        "C-11",
        "lets workers unpack a bundle in its final directory",
        "agent_shim/bulk/install.py",
        "    pieces = [Piece(target, files.sibling(Path(target.path))) for target in request.targets]\n"
        "    temps += [piece.temp for piece in pieces]\n",
        "    pieces = [Piece(target, Path(target.path)) for target in request.targets]\n",
        "an incomplete package has its final name",
    ),
)

NETWORK: Final = (
    Saboteur(
        "N-01",
        "waits a minute after a failed attempt",
        NATS,
        "        most = min(failures * self.step, self.longest)\n",
        "        most = 60.0\n",
        "did not answer a ping",
    ),
    Saboteur(
        "N-02",
        "sends a ping every 30 seconds",
        NATS,
        "    ping: float = 5.0\n",
        "    ping: float = 30.0\n",
        "did not notice the dead connection",
    ),
    Saboteur(
        "N-03",
        "waits a minute after an attempt that got no answer",
        NATS,
        "        most = min(failures * self.step, self.longest)\n",
        "        return 60.0\n        most = min(failures * self.step, self.longest)\n",
        "did not answer a ping",
    ),
    Saboteur(
        "N-04",
        "increases the pauses between attempts without a limit",
        NATS,
        "        most = min(failures * self.step, self.longest)\n",
        "        return 45.0 * failures\n        most = min(failures * self.step, self.longest)\n",
        "did not answer a ping",
    ),
    Saboteur(
        "N-05",
        "blocks the event loop while it waits for its worker",
        "agent_shim/bulk/workers.py",
        "            while piece := await loop.sock_recv(self._socket, CHUNK_BYTES):\n",
        "            self._socket.setblocking(True)\n            while piece := self._socket.recv(CHUNK_BYTES):\n",
        "a ping took|RpcTimeout",
    ),
    Saboteur(
        "N-06",
        "adds no jitter to the pauses between attempts",
        NATS,
        "        return random.uniform(most / 5 if most < self.longest else most / 2, most) * min(1 + slow, 3)  # noqa: S311\n",
        "        return most\n",
        "agents tried to connect within a second",
    ),
    Saboteur(
        "N-07",
        "does not notice that the settings have changed",
        "agent_shim/services/settings_store.py",
        "            if stamps == seen:\n",
        "            if stamps:\n",
        "did not answer a ping",
    ),
    Saboteur(
        "N-08",
        "adopts new credentials without trying them",
        NATS,
        "            new = await self._connect_persistently(mbus)\n",
        "            try:\n                new = await self._connect_persistently(mbus)\n"
        "            except ActionError:\n                return\n",
        "succeeded, but it should have been refused",
    ),
    Saboteur(
        "N-09",
        "waits five minutes after the server has refused it",
        NATS,
        "                    if is_refused and time.monotonic() < early_until:\n"
        "                        pause = self._timing.early_pause()\n",
        "                    if is_refused:\n                        pause = 300.0\n",
        "did not answer a ping",
    ),
    Saboteur(
        "N-10",
        "exits on a protocol error",
        LINK,
        "    async def _closed(self) -> None:\n",
        "    async def _closed(self) -> None:\n        raise SystemExit(70)\n",
        "I1:|stopped connecting",
    ),
    Saboteur(
        "N-11",
        "blocks the event loop until the server accepts what is sent",
        LINK,
        "        if self._client.pending_data_size + self.wire.backlog > MAX_BACKLOG_BYTES:\n",
        "        while self._client.pending_data_size + self.wire.backlog > 1 << 16:\n            __import__('time').sleep(0.01)\n        if self._client.pending_data_size + self.wire.backlog > MAX_BACKLOG_BYTES:\n",
        "did not answer a ping|RpcTimeout|I1:",
    ),
    Saboteur(
        "N-12",
        "resolves host names on the event loop",
        LINK,
        'await blocking.call(f"look up {host} for the bus", ask, timeout=LOOKUP_TIMEOUT_S, is_urgent=True)',
        "ask()",
        "job0 was not restarted|the metrics do not report|heartbeat",
    ),
    Saboteur(
        "N-13",
        "executes every copy of a request",
        NATS,
        "        if self._is_copy(data):\n",
        "        if not data:\n",
        "the script ran",
    ),
    Saboteur(
        "N-14",
        "publishes to subjects of any length",
        LINK,
        "if len(name) > MAX_SUBJECT_BYTES:",
        "if not name:",
        "did not keep its connection|did not answer a ping",
    ),
    Saboteur(
        "N-15",
        "considers a slow connection dead",
        NATS,
        "    ping: float = 5.0\n",
        "    ping: float = 0.3\n",
        "request .* failed: |a request took|heartbeat",
    ),
)

MESSAGES: Final = (
    Saboteur(
        "M-01",
        "exits when it cannot parse a request",
        "agent_shim/actions/dispatch.py",
        '            write_audit("", "dropped", time.monotonic(), error=exc)\n',
        "            raise SystemExit(70) from exc\n",
        "I1:|did not answer a ping|RpcTimeout",
    ),
    Saboteur(
        "M-02",
        "keeps 300 bytes in memory for every request",
        "agent_shim/actions/dispatch.py",
        _OF_A_REPLY,
        f"        self.__dict__.setdefault('kept', []).append(bytes(300))\n{_OF_A_REPLY}",
        "I4: .* of memory",
    ),
    Saboteur(
        "M-03",
        "returns the whole output of a script",
        "agent_shim/services/scripts.py",
        "            if taken <= limit or keep == 0:\n",
        "            if True:\n",
        "maximum allowed length|the reply contains only",
    ),
)

DISKS: Final = (
    Saboteur(
        "D-05",
        "does not compare digests",
        "agent_shim/core/digest.py",
        "        if actual not in self.digests:\n",
        "        if not actual:\n",
        "should have been refused|wrong package",
    ),
    Saboteur(
        "D-01",
        "does not remove temporary files when the disk is full",
        "agent_shim/host/files.py",
        '    with attempting(f"remove {path}"), suppress(FileNotFoundError):\n        if not stat.S_ISDIR(path.lstat().st_mode):\n',
        '    if is_leftover(path.name):\n        return\n    with attempting(f"remove {path}"), suppress(FileNotFoundError):\n'
        "        if not stat.S_ISDIR(path.lstat().st_mode):\n",
        "left temporary files behind",
    ),
    Saboteur(
        "D-02",
        "reports an install without inodes as successful",
        "agent_shim/services/bundles.py",
        "            if outcome.error:\n",
        "            if outcome.error and 'No space' not in outcome.error:\n",
        "does not say that there is no space|should have been refused",
    ),
    Saboteur(
        "D-03",
        "does not sync files to the disk",
        "agent_shim/host/files.py",
        "logger = logging.getLogger(__name__)\n",
        "logger = logging.getLogger(__name__)\nos.fsync = os.fdatasync = lambda _: None\n",
        "should have been refused",
    ),
    Saboteur(
        "D-04",
        "syncs all disks on the event loop when it measures the size of one",
        "agent_shim/services/vitals.py",
        "            return await blocking.call(\n",
        "            os.sync()\n            return os.statvfs(path)\n            return await blocking.call(\n",
        "a request took|heartbeats in|RpcTimeout",
    ),
    Saboteur(
        "D-06",
        "unpacks links that point outside the directory, and follows them",
        "agent_shim/bulk/archive.py",
        '    if name.startswith("/") or ".." in parts or "\\0" in name:\n',
        '    if "\\0" in name:\n',
        "wrote a file outside its directory|should have been refused",
    ),
    Saboteur(
        "D-11",
        "confirms a stop that it could not save",
        "agent_shim/supervisor/supervisor.py",
        "        if unsaved is not None:\n            raise unsaved\n",
        "",
        "the stopped jobs run again|job_state is failing and",
    ),
    Saboteur(
        "D-10",
        "replaces a file that is a mount point",
        "agent_shim/host/files.py",
        "        if not path.is_symlink() and is_mount_point(path):\n            _write_in_place(path, data)\n            return\n",
        "",
        "the mounted file should contain|RpcRemoteError: cannot",
    ),
    Saboteur(
        "D-07",
        "does not report files that vanished while it packed them",
        "agent_shim/bulk/packing.py",
        'VANISHED: Final = "it vanished before it was read"\n',
        'VANISHED: Final = ""\n',
        "no note about the logs that vanished",
    ),
    Saboteur(
        "D-08",
        "compresses logs but does not truncate them",
        "agent_shim/bulk/copytruncate.py",
        "    os.ftruncate(source, 0)\n",
        "    pass\n",
        "not all large logs were rotated",
    ),
    Saboteur(
        "D-09",
        "reports a migration as done without copying anything",
        "agent_shim/services/disks/service.py",
        "await self._copy(source.there, target.there, report)",
        "list[str]()",
        "files changed when the agent was killed|the files on the new disk differ",
    ),
)

JOBS: Final = (
    Saboteur(
        "S-01",
        "restarts one process every second",
        "agent_shim/supervisor/supervisor.py",
        "restarts = TokenBucket(RESTART_BURST, RESTARTS_PER_SECOND)",
        "restarts = TokenBucket(1, 1)",
        "not all killed jobs were restarted",
    ),
    Saboteur(
        "S-02",
        "restarts without a back-off",
        "agent_shim/supervisor/service.py",
        "        return max(least, min(backoff, limit))\n",
        "        return least + 0.1\n",
        "a job was started .* times in 1 min",
    ),
    Saboteur(
        "S-03",
        "gives a daemon one second to write its pidfile",
        "agent_shim/supervisor/ownership/process_finder.py",
        "        allowed = max(spec.start.timeout if spec.start else 0.0, self._timing.linger)\n",
        "        allowed = 1.0\n",
        "I2:|daemon that writes no pidfile|daemon with the late pidfile|should be running",
    ),
    # Leave out PID 1, because the agent would also stop its descendants, which include the process that runs the
    # case.
    Saboteur(
        "S-04",
        "trusts any pid in a pidfile, except 1",
        "agent_shim/supervisor/ownership/tie.py",
        "    if found.identity == record.known:\n",
        '    if found.pid > 1:\n        return Tie.OWNED, ""\n    if found.identity == record.known:\n',
        "the foreign process was killed|should be running|I1:",
    ),
    Saboteur(
        "S-05",
        "mistakes a process that reuses a pid for the one that had it before",
        "agent_shim/supervisor/ownership/tie.py",
        '        return Tie.NONE, "its pidfile is older than the process"\n    if found.pid == 1:',
        '        return Tie.OWNED, ""\n    if found.pid == 1:',
        "got a signal",
    ),
    Saboteur(
        "S-06",
        "reaps only one child per SIGCHLD",
        "agent_shim/host/reaper.py",
        "        while dead := os.waitid(",
        "        if dead := os.waitid(",
        "not all orphans were reaped",
    ),
    Saboteur(
        "S-09",
        "keeps the whole output of start programs",
        "agent_shim/supervisor/supervisor.py",
        "            await self._programs.trim()\n",
        "            pass\n",
        "of output were kept",
    ),
    Saboteur(
        "S-10",
        "writes its log on the event loop",
        "agent_shim/core/log.py",
        "        while self._waiting and self._has_room(timeout_s):\n",
        "        while self._waiting:\n",
        "RpcTimeout|did not answer a ping|TimeoutError",
    ),
    Saboteur(
        "S-11",
        "forgets a start that follows a stop in progress",
        "agent_shim/supervisor/state.py",
        "_RESTART: Final = Move(State.BOUNCING)\n",
        "_RESTART: Final = Move(State.STOPPING)\n",
        "restart and restart after .* did not leave the job",
    ),
    Saboteur(
        "S-12",
        "uses no monit file if one of them is invalid",
        "agent_shim/supervisor/plan.py",
        "for job, file in parsed if job not in errors for",
        "for job, file in parsed if not errors for",
        "is unknown after",
    ),
    Saboteur(
        "S-13",
        "does not count the memory of processes",
        "agent_shim/supervisor/rule_engine.py",
        '            "totalmemory": total,\n',
        '            "totalmemory": 0,\n',
        "the job was not restarted",
    ),
    Saboteur(
        "S-14",
        "blocks the event loop while it reads from the target of a check",
        "agent_shim/supervisor/network_checks.py",
        "        chunk = await asyncio.get_running_loop().sock_recv(self.sock, CHUNK)\n",
        "        self.sock.setblocking(True)\n        chunk = self.sock.recv(CHUNK)\n",
        "RpcTimeout|the killed job was not restarted|should be running",
    ),
    Saboteur(
        "S-15",
        "computes uptimes from the wall clock",
        "agent_shim/host/clock.py",
        "def uptime_of(start_ticks: int) -> int:\n",
        "_ORIGIN = time.time() - boot_time()\n\n\ndef uptime_of(start_ticks: int) -> int:\n"
        "    return int(time.time() - _ORIGIN - start_ticks / TICKS)\n",
        "uptimes of|no heartbeat arrived|I2:|job_state is",
    ),
    Saboteur(
        "S-07",
        "does not look for processes that are left after a stop",
        "agent_shim/supervisor/ownership/keepers.py",
        "        of_others = asyncio",
        "        return []\n        of_others = asyncio",
        "processes of the job are still running|processes are still running after a stop",
    ),
    Saboteur(
        "S-08",
        "waits for a stop program without a time limit",
        "agent_shim/supervisor/launcher.py",
        "            async with asyncio.timeout(_seconds_left(patience, by)):\n",
        "            async with asyncio.timeout(None):\n",
        "TimeoutError|still running after|RpcTimeout",
    ),
)

RESOURCES: Final = (
    Saboteur(
        "R-01",
        "exits when it has no descriptors left",
        "agent_shim/actions/dispatch.py",
        "    def failure(self, method: str, exc: BaseException) -> str:\n",
        "    def failure(self, method: str, exc: BaseException) -> str:\n        if 'Too many open files' in str(exc):\n            raise SystemExit(70)\n",
        "I1:|did not answer a ping|all requests succeeded",
    ),
    Saboteur(
        "R-02",
        "never starts a job again after a start has failed",
        "agent_shim/supervisor/service.py",
        "        self.on(Trigger.FAILED)\n",
        "        self.on(Trigger.UNMONITOR_ASKED)\n",
        "the job that died was not restarted",
    ),
    Saboteur(
        "R-03",
        "does not notice that the OOM killer has killed a process",
        "agent_shim/supervisor/oom.py",
        "        self._unclaimed.pop(0)\n        return True\n",
        "        return False\n",
        "no alert named the job|no alert reported",
    ),
    Saboteur(
        "R-04",
        "keeps the packages that it installs in memory",
        "agent_shim/services/bundles.py",
        "            done = await self._execute(",
        "            _held = bytearray(b'x') * (80 << 20)\n            done = await self._execute(",
        "I1:|RpcTimeout|TimeoutError",
    ),
    Saboteur(
        "R-05",
        "uses almost a second of CPU time for each ping after a start, which takes longer on busy CPUs",
        "agent_shim/actions/dispatch.py",
        _OF_A_REPLY,
        "        self.__dict__.setdefault(request.method)\n        if request.method == 'ping' and 'start' in self.__dict__:\n"
        "            end = time.thread_time() + 0.97\n            while time.thread_time() < end:\n                pass\n"
        f"{_OF_A_REPLY}",
        "a ping took|RpcTimeout",
    ),
    Saboteur(
        "R-06",
        "exits when it cannot start another thread",
        "agent_shim/host/blocking.py",
        '                raise OSError(errno.EAGAIN, f"{exc}") from None\n',
        "                raise SystemExit(70) from exc\n",
        "RpcTimeout|I1:|no heartbeat arrived|did not answer a ping",
    ),
)

INVARIANTS: Final = (
    Saboteur(
        "I9",
        "writes each audit line 400 times",
        "agent_shim/actions/dispatch.py",
        '    audit.info("request", extra={"members": members})\n',
        '    for _ in range(400):\n        audit.info("request", extra={"members": members})\n',
        "I9:",
        case="N-13",
    ),
    Saboteur(
        "I1",
        "exits two seconds after a start",
        "agent_shim/actions/jobs.py",
        "    await agent.state_backup.prepared()\n    agent.supervisor.end_hold()\n",
        "    import os\n    asyncio.get_running_loop().call_later(2, os._exit, 0)\n"
        "    await agent.state_backup.prepared()\n    agent.supervisor.end_hold()\n",
        "I1:",
        case="N-13",
    ),
    Saboteur(
        "I2",
        "restarts all jobs when it runs one of their scripts",
        "agent_shim/actions/scripts.py",
        "    await agent.scripts.run_all(name, agent.spec.current.job_names, options.env)\n    return {}\n",
        "    await agent.scripts.run_all(name, agent.spec.current.job_names, options.env)\n    for each in agent.supervisor._all():\n        each.bounce()\n    return {}\n",
        "I2:",
        case="N-13",
    ),
    Saboteur(
        "I3",
        "answers nothing for three seconds, beginning one second after a request",
        "agent_shim/actions/dispatch.py",
        _OF_A_REPLY,
        "        if request.method == 'run_script':\n"
        f"            asyncio.get_running_loop().call_later(1, time.sleep, 3)\n{_OF_A_REPLY}",
        "I3:",
        case="N-13",
    ),
    Saboteur(
        "I4",
        "opens a file for each request and never closes it",
        "agent_shim/actions/dispatch.py",
        _OF_A_REPLY,
        f"        __import__('os').open('/dev/null', 0)\n{_OF_A_REPLY}",
        "I4: .* descriptors",
        case="N-13",
    ),
    Saboteur(
        "I5",
        "reaps no child process",
        "agent_shim/host/process.py",
        "    os.waitid(os.P_PID, pid, os.WEXITED)\n    _spawned.pop(pid, None)\n",
        "    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\n    _spawned.pop(pid, None)\n",
        "I5:",
        case="S-03",
    ),
    Saboteur(
        "I6",
        "does not remove what a refused install had unpacked",
        "agent_shim/host/files.py",
        '    with attempting(f"remove {path}"), suppress(FileNotFoundError):\n        if not stat.S_ISDIR(path.lstat().st_mode):\n',
        '    if is_leftover(path.name):\n        return\n    with attempting(f"remove {path}"), suppress(FileNotFoundError):\n'
        "        if not stat.S_ISDIR(path.lstat().st_mode):\n",
        "I6: .*data/(jobs|packages)/",
        case="D-06",
    ),
    Saboteur(
        "I7",
        "writes an incomplete health.json",
        "agent_shim/actions/state.py",
        'msgspec.json.encode({"state": agent.supervisor.job_state()})',
        'msgspec.json.encode({"state": agent.supervisor.job_state()})[:-2]',
        "I7:",
        case="S-07",
    ),
    Saboteur(
        "I8",
        "reports a finished task as running forever",
        "agent_shim/actions/tasks.py",
        "        self._finish(task, state, outcome)\n        self.running = None\n",
        "        self._finish(task, state, outcome)\n",
        "I8:",
        case="N-13",
    ),
    Saboteur(
        "I10",
        "keeps a world-readable copy of the settings",
        "agent_shim/services/settings_store.py",
        "write_atomic, path, raw, mode=0o600",
        "write_atomic, path, raw, mode=0o644",
        "I10: .*settings.json",
        case="N-14",
    ),
)

SABOTEURS: Final = (*CRASHES, *NETWORK, *JOBS, *DISKS, *RESOURCES, *MESSAGES, *INVARIANTS)

_PUBLISH: Final = '        await self.bus.publish(f"hm.agent.{kind}.{self.agent.settings.current.agent_id}", message)\n'
_NEXT: Final = "        task, work = await self._queue.get()\n"
_ALERT: Final = "    if event.lower() in IGNORED:\n"
_ERRAND: Final = '"exit_code": errand.exit_code}'

_FOUND_MOUNTED: Final = '                raise ActionError(f"cannot mount disk {cid}: it is not mounted afterwards")\n'

GENERAL: Final = (
    Saboteur(
        "G-01",
        "sends no heartbeat after a reconnect",
        "agent_shim/daemon/runtime.py",
        _PUBLISH,
        f'        if kind == "heartbeat" and self.bus.stats.connects > 1:\n            {RAN}\n            return\n{_PUBLISH}',
        "I11:|heartbeat",
    ),
    Saboteur(
        "G-02",
        "sends alerts only for recoveries",
        "agent_shim/edges/alerts.py",
        f"{_ALERT}        return None\n",
        f"    if event.lower() not in IGNORED:\n        {RAN}\n        return None\n",
        "I12:|alert",
        mark="I12: 0 alerts match",
    ),
    Saboteur(
        "G-03",
        "drops errands and compilations",
        "agent_shim/actions/tasks.py",
        _NEXT,
        f"{_NEXT}        if task.method in ('run_errand', 'compile_package'):\n            {RAN}\n            return\n",
        r"I17:|I8:|Timed out|TimeoutError|RpcTimeout|within [\d.]+ s",
        mark="I17: a task failed: TimeoutError",
    ),
    Saboteur(
        "G-04",
        "reports exit code 0 for each errand",
        "agent_shim/actions/scripts.py",
        _ERRAND,
        f'"exit_code": {RAN} or 0}}',
        "I17:|exit code",
        mark="I17: the reported result of an errand .*'exit_code': 0}",
    ),
    Saboteur(
        "G-05",
        "mounts a disk twice",
        "agent_shim/services/disks/mounting.py",
        "                volumes.show(volume, place, bind=self._may_bind())\n",
        f"                volumes.show(volume, place, bind=self._may_bind())\n                {RAN}\n"
        "                mounts.bind(volume, place)\n",
        "I14:|disk|mount",
    ),
    Saboteur(
        "G-06",
        "reports that a disk is mounted, but unmounts it",
        "agent_shim/services/disks/service.py",
        _FOUND_MOUNTED,
        f"{_FOUND_MOUNTED}            volumes.take_away(self._paths.store)\n            {RAN}\n",
        "I14:|disk|mount",
    ),
    Saboteur(
        "G-07",
        "adds a line to one file in each job that it installs",
        "agent_shim/services/bundles.py",
        '            links = self.path(job) / "packages"\n',
        f'            (self.path(job) / "monit").open("a").write("# more\\n")\n            {RAN}\n'
        '            links = self.path(job) / "packages"\n',
        "I13:|did not produce the same files",
        mark=r"I13: jobs/\S+/monit differs from its blob",
    ),
    Saboteur(
        "G-08",
        "gives all users access to the jobs when it starts",
        "agent_shim/daemon/job_recovery.py",
        "    async def run(self) -> None:\n",
        "    async def run(self) -> None:\n        for each in self._agent.paths.jobs.glob('*/bin/ctl'):\n"
        f"            each.chmod(0o777)\n            {RAN}\n",
        "I13:|did not produce the same files",
    ),
    Saboteur(
        "G-09",
        "leaves out the end of each file that it packs",
        "agent_shim/bulk/packing.py",
        "        read_bytes, problem = self._sink.write_file(fd, runs, size)\n",
        "        read_bytes, problem = self._sink.write_file(fd, [(begin, end * 9 // 10) for begin, end in runs], size)\n"
        f"        {RAN}\n",
        "I17:",
        mark="I17: a log is missing or incomplete|I17: a compiled package does not contain",
    ),
    Saboteur(
        "G-10",
        "removes the pidfile of a job that it stops, and does not look for processes that are left",
        "agent_shim/supervisor/service.py",
        "            await self._run_stop()\n        if self.spec.start is not None:\n",
        "            await self._run_stop()\n            if self._finder.process is not None and self._finder.process.is_alive:\n"
        f"                {RAN}\n                __import__('pathlib').Path(self.spec.pidfile or '/nothing').unlink(missing_ok=True)\n"
        "            self.on(Trigger.EMPTIED)\n            return\n        if self.spec.start is not None:\n",
        "I15:|I16:|I2:|still running|killed",
    ),
    Saboteur(
        "G-11",
        "reports stopped jobs as running",
        "agent_shim/actions/state.py",
        '        "state": process.state,\n',
        f'        "state": process.state if process.state in ("running", "starting", "failing") else ({RAN} or "running"),\n',
        "I16:",
    ),
    Saboteur(
        "G-12",
        "treats every rule's limit as exceeded",
        "agent_shim/supervisor/rule_counter.py",
        "    return bool(violates(value, limit.limit))\n",
        f"    {RAN}\n    return bool(violates(value, limit.limit)) or True\n",
        "I2:|I12:|restarted again",
    ),
    Saboteur(
        "G-13",
        "reports that settings are updated, but does nothing",
        "agent_shim/actions/state.py",
        "    if wanted != before.mbus:\n",
        f"    if wanted != before.mbus:\n        {RAN}\n        return 'ok'\n    if wanted != before.mbus:\n",
        "still uses the old connection|should have been refused",
    ),
    Saboteur(
        "G-14",
        "reports that the jobs are stopped, but does nothing",
        "agent_shim/actions/jobs.py",
        '    with errors_as("Stopping Monitored Services", ActionError, HostError):\n',
        f"    if agent.supervisor.services():\n        {RAN}\n        return 'stopped'\n"
        '    with errors_as("Stopping Monitored Services", ActionError, HostError):\n',
        "I15:|I16:|I2:|still running",
    ),
    Saboteur(
        "G-15",
        "restarts a job after it has reconnected",
        "agent_shim/daemon/runtime.py",
        "        self.alerts.flush()\n",
        "        self.alerts.flush()\n        for each in [one for one in self.agent.supervisor._all() if one.process][-1:]:\n"
        f"            each.bounce()\n            {RAN}\n",
        "I2:|not restarted exactly once",
    ),
    Saboteur(
        "G-16",
        "reports the number of dropped alerts as the number of sent ones, and vice versa",
        "agent_shim/daemon/status_report.py",
        '"sent": live.alerts.sent, "dropped": live.alerts.dropped',
        f'"sent": live.alerts.dropped, "dropped": (live.alerts.sent and {RAN}) or live.alerts.sent',
        "I18:|alert",
    ),
)
"""General saboteurs, which do not belong to a row and are run with every case.

If the code of such a saboteur runs, the case must fail, either in its own checks or in an invariant.
"""
