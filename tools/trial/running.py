"""Runs the trial's commands, all with the same environment variables."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


class FailedError(Exception):
    """A trial step failed. The message has the form ``cannot X: why``."""


@dataclass
class Runner:
    """Runs commands and prints them with their output.

    ``inside`` is a command prefix that enters the node's namespaces.
    """

    state: Path
    inside: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    def env(self) -> dict[str, str]:
        """Return the environment variables for commands."""
        set_up = {"KUBECONFIG": str(self.kubeconfig), "BOSH_NON_INTERACTIVE": "true"}
        return {**os.environ, **set_up, **self.environment}

    def command(self, *argv: str) -> list[str]:
        """Return the command with the prefix that runs it in the node's namespaces."""
        return [*self.inside, *argv]

    def __call__(self, *argv: str, is_secret: bool = False) -> str:
        """Run a command on this machine and return its output. Unless ``is_secret`` is set, also print the output."""
        return self._run(argv, is_secret=is_secret)

    def kubectl(self, *arguments: str) -> str:
        return self._run(self.command("kubectl", *arguments))

    def bosh(self, *arguments: str, is_secret: bool = False) -> str:
        return self._run(self.command("bosh", *arguments), is_secret=is_secret)

    def _run(self, argv: Sequence[str], *, is_secret: bool = False) -> str:
        print(f"$ {shlex.join(argv)}", flush=True)
        said = []
        with subprocess.Popen(argv, env=self.env(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if not is_secret:
                    print(line, end="", flush=True)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, list(argv))
        return "".join(said)
