"""Provides the ssh server for ``bosh ssh``. If the container has none, the agent runs one for as long as it is needed.

The same rules apply as on a stemcell (bosh-linux-stemcell-builder stages/base_ssh): members of ``bosh_sshers`` can log
in, but only with a key, and root cannot log in. The server is recognized by its command line, not its pid, so that a
restarted agent can stop its predecessor's server.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent_shim.core.errors import HostError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.host import command, files, network, proc, process

LISTEN_TIMEOUT_S: Final = 10.0
"""How long a server may take to start listening."""
GRACE_S: Final = 2.0
"""Time between TERM and KILL, during which existing sessions continue and new ones are refused."""
POLL_S: Final = 0.02
MAX_LOG_BYTES: Final = 10_000_000
"""Size at which the server's log is truncated."""

_PRIVILEGE_SEPARATION: Final = Path("/run/sshd")
"""The empty directory that Debian's sshd needs for its unprivileged process. The agent has to create it, because /run
is empty in a new container.
"""
_OURS: Final = re.compile(r"(sshd: |\S*/sshd )")
"""Beginning of a server's command line. A running sshd puts ``sshd: `` in front of it."""

CONFIG: Final = """\
Port {port}
HostKey {key}
PidFile none
UsePAM yes
AllowGroups bosh_sshers
DenyUsers root
PermitRootLogin no
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthorizedKeysFile .ssh/authorized_keys
PermitUserEnvironment no
AcceptEnv LANG LC_*
X11Forwarding no
PrintMotd no
Subsystem sftp internal-sftp
"""


class Sshd:
    """Ensures that a server listens on ``port`` while ``is_needed`` returns True. Methods raise ``ActionError``."""

    def __init__(self, paths: Paths, port: int, is_needed: Callable[[], bool]) -> None:
        self._paths = paths
        self._port = port
        self.is_needed = is_needed
        self._key = paths.etc / "ssh/ssh_host_rsa_key"
        self._config = paths.shim_run / "sshd_config"
        self._log = paths.agent_log / "sshd.log"
        self._turn = asyncio.Lock()

    async def host_key(self) -> str:
        """Return the public RSA host key. A key pair is generated if the image has none."""
        async with self._turn:
            with errors_as("Getting host public key"):
                return (await asyncio.to_thread(files.read, await self._have_host_key())).decode(errors="replace")

    async def settle(self) -> None:
        """Start a server if one is needed and none is listening. If the agent's own server is no longer needed, stop
        it.
        """
        if not self._paths.is_system:
            return
        async with self._turn:
            if not self.is_needed():
                with errors_as("Stopping sshd"):
                    await self._stop()
                return
            with errors_as("Starting sshd"):
                if not await self._is_served():
                    await self._start()

    async def _is_served(self) -> bool:
        """Return True if a server is listening. Raises ``HostError`` if the listener belongs neither to root nor to the
        agent's user, because a job may have bound the port first.
        """
        users = await asyncio.to_thread(network.listeners, self._port)
        if others := users - {0, os.geteuid()}:
            whose = f"a process of user {min(others)}"
            raise HostError(f"port {self._port} is in use by {whose}, which is not sshd; stop it")
        return bool(users)

    async def _start(self) -> None:
        """Start the server and wait until it is listening. Raises ``HostError``."""
        program = shutil.which("sshd", path=command.ENVIRONMENT["PATH"])
        if program is None:
            raise HostError(f"nothing listens on port {self._port}, and sshd (package openssh-server) is not installed")
        if os.geteuid() != 0:
            raise HostError(f"nothing listens on port {self._port}, and the agent is not root")
        await self._have_host_key()
        await asyncio.to_thread(files.make_dir, _PRIVILEGE_SEPARATION, 0o755)
        config = CONFIG.format(port=self._port, key=self._key).encode()
        await asyncio.to_thread(files.write_atomic, self._config, config, mode=0o600)
        log_start = await asyncio.to_thread(self._truncate_log)
        argv = [program, "-D", "-e", "-f", str(self._config)]
        server = process.spawn(argv, env=command.ENVIRONMENT, stdout=self._log, stderr=self._log)
        try:
            async with asyncio.timeout(LISTEN_TIMEOUT_S):
                while not await self._is_served():
                    if not server.is_alive:
                        status = await server.wait()
                        output = files.read(self._log, is_own=True)[log_start:].decode(errors="replace")
                        raise HostError(f"it ended with code {status}: {' '.join(output.split())[-500:]}")
                    await asyncio.sleep(POLL_S)
        except HostError:
            await server.terminate(GRACE_S)
            raise
        except TimeoutError:
            await server.terminate(GRACE_S)
            raise HostError(f"it does not listen on port {self._port} after {LISTEN_TIMEOUT_S:.0f} seconds") from None

    async def _have_host_key(self) -> Path:
        """Return the path of the public key. Missing keys are created first (:func:`_make_host_key`), because sshd does
        not start without a private key.
        """
        public = self._key.with_suffix(".pub")
        if not await asyncio.to_thread(lambda: self._key.exists() and public.exists()):
            await _make_host_key(self._key, public)
        return public

    async def _stop(self) -> None:
        """Stop every server that was started with the agent's configuration file."""
        lines = await asyncio.to_thread(lambda: proc.command_lines(proc.table().keys()))
        for pid, line in lines.items():
            is_ours = _OURS.match(line) and str(self._config) in line and proc.user(pid) == os.geteuid()
            if is_ours and (server := process.adopt(pid)) is not None:
                await server.terminate(GRACE_S)

    def _truncate_log(self) -> int:
        """Truncate the log if it is larger than ``MAX_LOG_BYTES``. Return the offset at which new output will begin."""
        size = self._log.stat().st_size if self._log.exists() else 0
        if size > MAX_LOG_BYTES:
            os.truncate(self._log, 0)
            return 0
        return size


async def _make_host_key(private: Path, public: Path) -> None:
    """Derive the public key from an existing private key. If there is no private key that sshd could use, generate both
    keys.
    """
    try:
        derived = await command.run("ssh-keygen", "-y", "-P", "", "-f", str(private))
        await asyncio.to_thread(files.write_atomic, public, derived.encode())
    except HostError:
        await asyncio.to_thread(files.make_dir, private.parent, 0o755)
        with tempfile.TemporaryDirectory(dir=private.parent) as scratch:
            new_key = Path(scratch, "key")
            await command.run("ssh-keygen", "-q", "-t", "rsa", "-b", "3072", "-N", "", "-C", "", "-f", str(new_key))
            await asyncio.to_thread(new_key.replace, private)
            await asyncio.to_thread(new_key.with_suffix(".pub").replace, public)
