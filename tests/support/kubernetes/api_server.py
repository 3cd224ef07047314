"""Runs an API server and etcd without nodes or controllers, to test which objects it accepts and rejects."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import subprocess
import time
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes import node as nodes
from tests.support.ports import free_port

TIMEOUT_S = 300.0
"""Seconds that the API server may take to become ready on a busy machine."""


class ApiServer:
    """etcd and the API server on loopback ports. Requests are made as an administrator or on behalf of another user."""

    def __init__(self, programs: Path, where: Path) -> None:
        self._programs, self._where = programs, where
        self._token = secrets.token_hex()
        self._port = free_port()
        self._parts: list[subprocess.Popen[bytes]] = []
        self._trust = ssl.create_default_context()
        self._trust.check_hostname = False
        self._trust.verify_mode = ssl.CERT_NONE

    def start(self) -> None:
        """Start the programs and wait until they are ready. If they do not become ready, fail the test and show the end
        of the log.
        """
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        tokens, key = self._where / "tokens.csv", self._where / "key.pem"
        tokens.write_text(f'{self._token},admin,admin,"system:masters"\n')
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        self._spawn(
            "etcd",
            f"--data-dir={self._where / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={client}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            "--advertise-address=192.0.2.2",
            f"--cert-dir={self._where}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            f"--service-account-issuer=https://127.0.0.1:{self._port}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=198.51.100.0/24",
            "--allow-privileged=true",
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not self._is_ready():
            ended = [part.args for part in self._parts if part.poll() is not None]
            if ended or time.monotonic() > deadline:
                pytest.fail(f"no API server; ended: {ended}; {self._log('kube-apiserver').read_text()[-3000:]}")
            time.sleep(0.2)

    def stop(self) -> None:
        """Kill etcd and the API server."""
        for part in reversed(self._parts):
            part.kill()
            part.wait()

    @property
    def minor(self) -> int:
        """Return the Kubernetes minor version."""
        return int(self.request("GET", "/version")[1]["minor"].rstrip("+"))

    def request(
        self, method: str, path: str, body: Any = None, *, user: str = "", kind: str = "application/json"
    ) -> tuple[int, dict[str, Any]]:
        """Make a request, impersonating ``user`` if given. Return the status and the JSON body of the response."""
        connection = HTTPSConnection("127.0.0.1", self._port, context=self._trust, timeout=TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind, "Accept": "application/json"}
        if user:
            headers["Impersonate-User"] = user
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            return response.status, {"message": raw.decode(errors="replace")}

    def _is_ready(self) -> bool:
        try:
            return self.request("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def _log(self, program: str) -> Path:
        return self._where / f"{program}.log"

    def _spawn(self, program: str, *options: str) -> None:
        own = self._programs / program
        with self._log(program).open("wb") as log:
            command = [str(own) if own.exists() else program, *options]
            self._parts.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))


def programs() -> Path:
    """Return the directory that contains the Kubernetes programs. Fail the test if there is none.

    If no node is running, ``KUBERNETES_PROGRAMS`` names the directory.
    """
    if nodes.NODE in os.environ:
        return nodes.here() / nodes.PROGRAMS
    if given := os.environ.get("KUBERNETES_PROGRAMS"):
        return Path(given)
    pytest.fail("there is no API server here: ./dev test-kubernetes, or KUBERNETES_PROGRAMS", pytrace=False)
