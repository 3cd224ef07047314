"""``./dev try-kubernetes``: run a Director on a Kubernetes node on this machine, and a small deployment to experiment
with.

Needs docker or podman, kubectl, git and the bosh CLI, and access to registries, bosh.io and GitHub. If kind is
installed, it provides the node. Otherwise, the ``./dev test-kubernetes`` node is used, which requires root.
docs/try-kubernetes.md describes each step and what to try.

If a step fails, the next run continues with that step. The state is in .try-kubernetes, and --remove removes
everything.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from tools.trial import nodes
from tools.trial.running import FailedError, Runner

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
DEPLOYMENTS: Final = "https://github.com/cloudfoundry/bosh-deployment"
COMPILED: Final = r"ubuntu-(?P<line>\w+)-(?P<version>\d[\d.]*)\.tgz$"
"""Regular expression for the end of a compiled release's URL, which names the only stemcell for which the release is
compiled.
"""
NAMESPACE: Final = "bosh"
DEPLOYMENT: Final = "hello"
PAGE: Final = """
hello runs on BOSH on Kubernetes. `./dev try-kubernetes --shell` gives a shell with bosh and kubectl set up. Try there:

  bosh -d hello instances --ps                      the processes, as the agents in the pods report them
  kubectl -n bosh get pods -L bosh.io/instance_group,bosh.io/index
  POD=$(kubectl -n bosh get pods -l bosh.io/instance_group=hello,bosh.io/index=0 -o name)
  kubectl -n bosh exec $POD -- agent-shim status    the same from inside
  kubectl -n bosh exec $POD -- getent ahosts q-s0.hello.default.hello.bosh      all instances, by bosh-dns
  kubectl -n bosh exec $POD -- pkill -KILL -f counter.pl                          the agent restarts it at once
  bosh -d hello recreate hello/0                    another pod, the same disk
  kubectl -n bosh delete $POD                       the Health Monitor brings it back, or: bosh -d hello cck
  bosh -d hello deploy .try-kubernetes/hello.yml -v disk=256                    a larger disk, copied by the agent

docs/try-kubernetes.md tells more. `./dev try-kubernetes --remove` takes everything away.
"""


@dataclass
class Trial:
    """The trial's steps. Each can be repeated and keeps what an earlier run created."""

    runner: Runner
    node: nodes.Node
    deployments: Path
    bosh: dict[str, Any] = field(default_factory=dict)
    """Content of bosh-deployment's bosh.yml."""

    @property
    def state(self) -> Path:
        return self.runner.state

    def run(self) -> None:
        """Run all steps in order."""
        self.fetch()
        self.node.start(self.stemcell_line())
        self.account()
        release, stemcell = self.tarballs()
        self.director(release, stemcell)
        self.enter()
        self.configs()
        self.deploy(stemcell)

    def fetch(self) -> None:
        """Clone bosh-deployment, which determines the releases and their versions."""
        if not (self.deployments / "bosh.yml").exists():
            self.runner("git", "clone", "--quiet", "--depth=1", DEPLOYMENTS, str(self.deployments))
        self.bosh = yaml.safe_load((self.deployments / "bosh.yml").read_text())

    def stemcell_line(self) -> str:
        """Return the name of the Ubuntu version for which bosh-deployment's releases are compiled, such as
        ``noble``.
        """
        return self._compiled()["line"]

    def account(self) -> None:
        """Create the CPI's namespace and service account."""
        for place in ("privileged", "cluster-reader"):
            self.runner.kubectl("apply", "-k", f"deploy/cpi/{place}")

    def tarballs(self) -> tuple[str, str]:
        """Build the CPI release, and a stemcell with the version for which bosh-deployment's releases are compiled.

        Return the paths of both tarballs.
        """
        compiled = self._compiled()
        out = f"--out={self.state}"
        release = self.runner("./dev", "cpi-release", "--version", "0.1.0", out).split()[-1]
        image = ("--image", f"localhost/agent-shim@{self.node.digest()}")
        system = ("--os", f"ubuntu-{compiled['line']}", "--version", compiled["version"])
        return release, self.runner("./dev", "stemcell", "--light", *image, *system, out).split()[-1]

    def director(self, release: str, stemcell: str) -> None:
        """Create the Director in a pod. The node publishes the pod's ports."""
        values = {
            "cpi_release": f"file://{release}",
            "stemcell": f"file://{stemcell}",
            "kubernetes_namespace": NAMESPACE,
            "director_name": "try-kubernetes",
            "internal_ip": self.node.address,
        }
        operations = ("deploy/cpi/bosh/cpi.yml", "tools/trial/bosh/director.yml")
        self.runner.bosh(
            *("create-env", f"{self.deployments}/bosh.yml"),
            *("--state", f"{self.state}/state.json", "--vars-store", f"{self.state}/creds.yml"),
            *(word for name in operations for word in ("-o", name)),
            *(word for key, value in values.items() for word in ("-v", f"{key}={value}")),
            *("--var-file", f"kubeconfig={self.runner.kubeconfig}"),
        )

    def enter(self) -> None:
        """Set the environment variables that tell the CLI where the Director is."""
        made = yaml.safe_load((self.state / "creds.yml").read_text())
        self.runner.environment |= {
            "BOSH_ENVIRONMENT": self.node.address,
            "BOSH_CLIENT": "admin",
            "BOSH_CLIENT_SECRET": made["admin_password"],
            "BOSH_CA_CERT": made["director_ssl"]["ca"],
        }

    def configs(self) -> None:
        """Give the Director a cloud-config, and a runtime-config that adds bosh-dns to every VM."""
        self.runner.bosh("update-cloud-config", "deploy/cpi/bosh/cloud-config.yml", "-o", "tools/trial/bosh/cloud.yml")
        # Have the CLI generate the certificates, because this Director has no CredHub.
        store = f"--vars-store={self.state}/dns-creds.yml"
        said = self.runner.bosh("int", f"{self.deployments}/runtime-configs/dns.yml", store, is_secret=True)
        runtime = yaml.safe_load(said)
        runtime.pop("variables", None)
        for job in (job for addon in runtime["addons"] for job in addon["jobs"]):
            # Pods have no systemd-resolved, and some kernels do not have the dummy device, so do without both.
            job["properties"] |= {"configure_systemd_resolved": False, "override_nameserver": True}
        self.runner.bosh("update-runtime-config", "--name=dns", self._written("dns.yml", runtime))

    def deploy(self, stemcell: str) -> None:
        """Deploy the release in ``tools/trial/release``, together with the bpm release that bosh-deployment names."""
        self.runner.bosh("upload-stemcell", stemcell)
        # The CLI writes into a release's directory, so use a copy of the directory.
        source, tarball = self.state / "release", f"{self.state}/hello.tgz"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(HERE / "release", source)
        self.runner.bosh("create-release", "--force", "--timestamp-version", f"--dir={source}", f"--tarball={tarball}")
        self.runner.bosh("upload-release", tarball)
        manifest = yaml.safe_load((HERE / "bosh/hello.yml").read_text())
        manifest["stemcells"][0]["os"] = f"ubuntu-{self.stemcell_line()}"
        manifest["releases"].append(next(one for one in self.bosh["releases"] if one["name"] == "bpm"))
        self.runner.bosh("-d", DEPLOYMENT, "deploy", self._written("hello.yml", manifest), "-v", "disk=128")

    def _written(self, name: str, document: Any) -> str:
        path = self.state / name
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return str(path)

    def _compiled(self) -> Mapping[str, str]:
        url = next(one["url"] for one in self.bosh["releases"] if one["name"] == "bosh")
        found = re.search(COMPILED, url)
        if found is None:
            raise FailedError(f"cannot determine the stemcell for {url}: it is no release that was compiled on Ubuntu")
        return found.groupdict()


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev try-kubernetes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--remove", action="store_true", help="remove the node and the state")
    doing.add_argument("--shell", action="store_true", help="start a shell with bosh and kubectl set up")
    parser.add_argument("--state", type=Path, default=ROOT / ".try-kubernetes", help="directory of the state")
    parser.add_argument("--node", choices=("kind", "own"), help="node to use (default: kind if it is installed)")
    parser.add_argument("--bosh-deployment", type=Path, metavar="DIR", help="use this checkout instead of cloning it")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` describe, and return the exit code."""
    options = parsed(arguments)
    os.chdir(ROOT)
    state = options.state.resolve()
    runner = Runner(state)
    try:
        if not options.remove:
            nodes.require("kubectl", "bosh", "git")
            state.mkdir(mode=0o700, exist_ok=True)
        trial = Trial(runner, nodes.chosen(runner, options.node), options.bosh_deployment or state / "bosh-deployment")
        if options.remove:
            trial.node.remove()
            shutil.rmtree(state, ignore_errors=True)
        elif options.shell:
            trial.node.enter()
            trial.enter()
            shell = runner.command(os.environ.get("SHELL", "/bin/sh"))
            return subprocess.run(shell, env=runner.env(), check=False).returncode
        else:
            trial.run()
            print(PAGE)
    except FailedError as exc:
        print(f"try-kubernetes: {exc}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as exc:
        print(f"try-kubernetes: {shlex.join(map(str, exc.cmd))} ended with {exc.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
