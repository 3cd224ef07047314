"""Defines the frozen record through which actions use the services and the task queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from agent_shim.actions.tasks import Tasks
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Mbus
from agent_shim.services.bundles import Bundles
from agent_shim.services.compiler import Compiler
from agent_shim.services.disks import Disks
from agent_shim.services.dns import Dns
from agent_shim.services.logs.archives import Logs
from agent_shim.services.scripts import Scripts
from agent_shim.services.settings_store import SettingsStore
from agent_shim.services.spec_store import SpecStore
from agent_shim.services.sshd import Sshd
from agent_shim.services.state_backup import StateBackup
from agent_shim.services.trusted_cas import TrustedCas
from agent_shim.services.users import Users
from agent_shim.services.vitals import Vitals
from agent_shim.supervisor.supervisor import Supervisor


class EdgeCallbacks(msgspec.Struct, frozen=True):
    """Callbacks into ``edges``, which actions cannot import because it is on a higher floor."""

    announce_shutdown: Callable[[], Awaitable[None]]
    """Announce an intended shutdown to the Health Monitor."""
    reconnect: Callable[[Mbus], Awaitable[None]]
    """Switch to other bus addresses or credentials. Raises ``ActionError`` if the bus cannot be reached with them."""
    shut_down: Callable[[], None]
    """Stay idle from now on, because the Director has shut this instance down."""


class Agent(msgspec.Struct, frozen=True):
    """The services that actions use."""

    paths: Paths
    settings: SettingsStore
    spec: SpecStore
    tasks: Tasks
    supervisor: Supervisor
    bundles: Bundles
    compiler: Compiler
    scripts: Scripts
    logs: Logs
    vitals: Vitals
    dns: Dns
    users: Users
    sshd: Sshd
    certificates: TrustedCas
    disks: Disks
    state_backup: StateBackup
    edges: EdgeCallbacks
