"""Manages the machine's users: temporary ones for ``bosh ssh``, and the keys and passwords of vcap and root.

Names, groups, paths and error prefixes match those of the Go agent (agent/action/ssh.go, platform/linux_platform.go).
Files in a home directory are written by a process with the owner's rights. If root wrote them, the owner could use a
link to redirect the write to a file that only root may change. Password hashes are never passed as program arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent_shim.core.errors import ActionError, HostError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.host import command, files, guarded, proc, process

logger = logging.getLogger(__name__)

PREFIX: Final = "bosh_"
"""Prefix of the names of users that the agent is allowed to remove. The Director uses it for all users that it creates.
"""
GROUPS: Final = "vcap,admin,bosh_sudoers,bosh_sshers"
NO_PASSWORD: Final = "*"  # noqa: S105 - locks the password
"""Stored in place of a password hash, so that no password matches."""
_USER: Final = r"[a-z][a-z0-9_]{0,31}"

KEYS_TIMEOUT_S: Final = 10.0
"""Timeout for the process that writes keys as a user. Other processes of that user may suspend it with a signal, so it
might never finish.
"""
EXIT_TIMEOUT_S: Final = 5.0
"""How long a removed user's processes may take to exit after SIGKILL."""
_POLL_S: Final = 0.05
_KILL_ALL: Final = """
import os, sys
user, unused = map(int, sys.argv[1:])
os.setresuid(unused, user, unused)
try:
    os.kill(-1, 9)
except ProcessLookupError:
    pass
"""
"""A script that kills all of a user's processes with a single system call, so that none escapes by forking. Its real
and saved uid are set to an unused uid, so that the user's processes cannot kill it first.
"""

_REPLACE_KEYS: Final = """
umask 077 && cd "$HOME" && mkdir -p .ssh && chmod 700 .ssh &&
rm -rf .ssh/authorized_keys.new && cat >.ssh/authorized_keys.new && mv -fT .ssh/authorized_keys.new .ssh/authorized_keys
"""


class Users:
    """Creates and removes users. Runs one command at a time, because all commands write the same files."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._turn = asyncio.Lock()

    async def setup(self, user: str, public_key: str) -> None:
        """Allow logins as ``user`` with ``public_key``. The user is created if missing."""
        if re.fullmatch(_USER, user) is None:
            why = "it must be a letter a-z, followed by up to 31 of a-z, 0-9 and _"
            raise ActionError(f"Creating user: cannot use the name {user[:64]!r}: {why}")
        if not self._paths.is_system:
            raise ActionError(f"Creating user: the agent works below {self._paths.base} and may not change the machine")
        if os.geteuid() != 0:
            raise ActionError("Creating user: cannot make users: the agent is not root")
        async with self._turn:
            known = self.made()
            try:
                with errors_as("Creating user"):
                    await self._create(user, known)
                with errors_as("Adding user to groups"):
                    await command.run("usermod", "-G", GROUPS, user)
                with errors_as("Setting ssh public key"):
                    await self._authorize(user, self._paths.ssh_home / user, public_key)
            except BaseException:
                # Remove the user if it was created above. This also happens if the task is cancelled.
                if user not in known and user in self.made():
                    with contextlib.suppress(HostError):
                        await remove(user)
                raise

    async def cleanup(self, user_regex: str) -> list[str]:
        """Remove the users whose names match the regular expression, with their home directories. Users whose names do
        not begin with ``bosh_`` are never removed. Return the names of the removed users.
        """
        async with self._turn:
            created = self.made() if self._paths.is_system else []
            with errors_as("SSH Cleanup: Deleting Ephemeral Users", OSError, re.error):
                pattern = re.compile(user_regex, re.ASCII)
                matching = [user for user in created if user.startswith(PREFIX) and pattern.search(user)]
                for user in matching:
                    await remove(user)
        return matching

    async def authorize_vcap(self, keys: Sequence[str]) -> None:
        """Replace vcap's authorized keys with ``keys``."""
        async with self._turn:
            with errors_as("cannot authorize keys for vcap"):
                try:
                    home = pwd.getpwnam("vcap").pw_dir
                except KeyError:
                    raise HostError("there is no such user") from None
                await self._authorize("vcap", Path(home), "\n".join(keys))

    async def set_passwords(self, hashed: str, *, keep_root: bool) -> None:
        """Store the crypt hash ``hashed`` as vcap's password and, unless ``keep_root`` is set, as root's."""
        users = ["vcap"] if keep_root else ["root", "vcap"]
        async with self._turn:
            with errors_as(f"cannot set the password of {' and '.join(users)}"):
                if hashed == NO_PASSWORD and not await asyncio.to_thread(self._has_password, users):
                    return  # no password to remove
                await command.run("chpasswd", "-e", given="".join(f"{user}:{hashed}\n" for user in users))

    async def _create(self, user: str, known: Sequence[str]) -> None:
        """Create a user, or reconfigure an existing one."""
        if user not in known:
            if user in (row[0] for row in self._accounts()):
                raise HostError(f"cannot use the name {user!r}: it belongs to another user of this machine")
            await asyncio.to_thread(files.make_dir, self._paths.ssh_home, 0o755)
            await command.run("useradd", "-m", "-b", str(self._paths.ssh_home), "-s", "/bin/bash", user)
        await asyncio.to_thread(files.make_dir, self._paths.ssh_home / user, 0o700)

    async def _authorize(self, user: str, home: Path, keys: str) -> None:
        """Replace the authorized keys of ``user``, running as that user."""
        env = command.ENVIRONMENT | {"HOME": str(home)}
        become = []
        if os.geteuid() == 0:
            # The gid of the user's primary group. There is none if the user is not in /etc/passwd.
            groups = [row[3] for row in self._accounts() if row[0] == user]
            become = [
                process.SETPRIV,
                f"--reuid={user}",
                *(f"--regid={group}" for group in groups[:1]),
                "--clear-groups",
            ]
        replace = ["/bin/sh", "-c", _REPLACE_KEYS]
        await command.run(*replace, given=keys, through=become, env=env, timeout=KEYS_TIMEOUT_S)

    def _has_password(self, users: Sequence[str]) -> bool:
        """Return True if at least one of ``users`` has a usable password."""
        rows = [line.split(":") for line in (self._paths.etc / "shadow").read_text(errors="replace").splitlines()]
        return any(row[0] in users and not row[1].startswith(("*", "!")) for row in rows if len(row) > 1)

    def made(self) -> list[str]:
        """Return the users that the agent created. Their names begin with ``bosh_``, or their home is in the agent's
        directory for users.
        """
        homes = str(self._paths.ssh_home)
        return [row[0] for row in self._accounts() if row[0].startswith(PREFIX) or row[5:6] == [f"{homes}/{row[0]}"]]

    def _accounts(self) -> list[list[str]]:
        """Return the fields of each line in ``/etc/passwd``: name, password, uid, gid, comment, home, shell."""
        return [line.split(":") for line in (self._paths.etc / "passwd").read_text(errors="replace").splitlines()]


async def remove(user: str) -> None:
    """Remove a user, its home directory and its processes.

    The account is removed first, so that nobody can log in. Then the processes are killed, so that they cannot change
    the home directory while it is being removed.
    """
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise HostError(f"cannot remove {user}: its entry cannot be read") from None
    await command.run("userdel", "-f", user)
    try:
        await _end_processes(account)
    finally:
        await asyncio.to_thread(_remove_files, account)


async def _end_processes(account: pwd.struct_passwd) -> None:
    """Kill a removed account's processes, because another account with the same uid may be created later."""
    if account.pw_uid == 0 or any(entry.pw_uid == account.pw_uid for entry in pwd.getpwall()):
        return  # an administrator may have given the same uid to another account
    if not proc.has_our_root(1):
        logger.warning("processes of %s may continue: the container shares the pids of the host", account.pw_name)
        return
    # With an unused uid as its real and saved uid, the script cannot be killed by the account's processes.
    unused = await asyncio.to_thread(_unused_uid, account.pw_uid)
    await command.run(sys.executable, "-I", "-S", "-c", _KILL_ALL, str(account.pw_uid), str(unused))
    try:
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            while await asyncio.to_thread(_has_processes, account.pw_uid):  # noqa: ASYNC110 - no event reports these exits
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        why = "some do not end when they are killed"
        raise HostError(f"cannot end all processes of {account.pw_name}: {why}") from None


def _unused_uid(below: int) -> int:
    """Return the highest uid less than ``below`` that has neither an account nor a process. A higher uid may have no
    mapping in a user namespace. Blocks.
    """
    used = {entry.pw_uid for entry in pwd.getpwall()} | {proc.user(pid) for pid in proc.table()}
    return next(number for number in range(below - 1, 0, -1) if number not in used)


def _remove_files(account: pwd.struct_passwd) -> None:
    """Remove the home directory and mail of a removed account if the account owns them, as ``userdel -r`` does. A home
    directory that is not named after the account is kept, because it may have another purpose. Blocks.
    """
    for path in (Path(account.pw_dir), Path("/var/mail", account.pw_name)):
        try:
            owner = guarded.status(path).st_uid
        except OSError:  # there is no such file
            continue
        if owner == account.pw_uid and path.name == account.pw_name:
            files.remove_tree(path)


def _has_processes(uid: int) -> bool:
    return any(stat.is_alive and proc.user(stat.pid) == uid for stat in proc.table().values())
