"""A stand-in for the bosh CLI (bosh-cli 7 with Director 283). Its answers come from a description of the Director's
database.

It prints one JSON document with tables, the output of `curl`, and text lines. The last line is `Succeeded`, or
`Exit code 1` after an error message. The description's ``failing`` member maps each path or command that the Director
rejects to an HTTP status.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, NoReturn

FAILED = "Director responded with non-successful status code '{}' response '{}'"


class CliError(Exception):
    """An error whose message the CLI prints before it exits with status 1."""


class _GoFlagsParser(argparse.ArgumentParser):
    """Reports invalid arguments as go-flags does: as a command error, in the command's output format."""

    def error(self, message: str) -> NoReturn:
        raise CliError(message)


class _Cli:
    def __init__(self, state: dict[str, Any], directory: Path, deployment: str) -> None:
        self.state = state
        self.directory = directory
        self.default_deployment = deployment
        self.output: dict[str, Any] = {"Tables": None, "Blocks": None, "Lines": ["Using environment 'x' as client 'a'"]}

    def run(self, argv: list[str]) -> None:
        given = _parser().parse_args(argv)
        deployment = given.deployment or self.default_deployment
        command = getattr(self, "do_" + given.command.replace("-", "_"))
        needs = command.__code__.co_varnames[1 : command.__code__.co_argcount]
        if "deployment" in needs and given.command != "instances" and not deployment:
            raise CliError("Expected non-empty deployment name")
        command(*(deployment if name == "deployment" else given for name in needs))

    def get(self, path: str) -> Any:
        """Return the Director's response to a GET request."""
        if status := self.state.get("failing", {}).get(path):
            raise CliError(FAILED.format(status, "refused"))
        where, _, query = path.partition("?")
        if where == "/tasks":
            return [one for one in self.state.get("tasks", []) if one["state"] in query]
        found = re.fullmatch(r"/deployments/([^/]+)/(vms|snapshots)", where)
        if found:
            return self.deployment(found[1])[found[2]]
        if where == "/deployments":
            return [{"name": name, "teams": []} for name in self.state["deployments"]]
        if where not in ("/info", "/disks", "/orphaned_vms", "/dynamic_disks"):
            raise CliError(FAILED.format(404, f"Endpoint '{where}' not found."))
        return self.state.get(where[1:], [])

    def deployment(self, name: str) -> dict[str, Any]:
        if name not in self.state["deployments"]:
            raise CliError(FAILED.format(404, f"Deployment '{name}' doesn't exist"))
        return {"instances": [], "vms": [], "snapshots": [], **self.state["deployments"][name]}

    def table(self, content: str, titles: list[str], rows: list[list[str]]) -> None:
        keys = [title.lower().replace(" ", "_") for title in titles]
        table = {
            "Content": content,
            "Header": dict(zip(keys, titles, strict=True)),
            "Rows": [dict(zip(keys, row, strict=True)) for row in rows],
            "Notes": None,
        }
        self.output["Tables"] = [*(self.output["Tables"] or []), table]

    def do_curl(self, given: argparse.Namespace) -> None:
        self.output["Blocks"] = [json.dumps(self.get(given.path))]

    def do_instances(self, deployment: str) -> None:
        for name in [deployment] if deployment else self.state["deployments"]:
            if status := self.state.get("failing", {}).get("instances"):
                raise CliError(f"Fetching instances: {FAILED.format(status, 'Not authorized')}")
            rows = [[vm, "\n".join(disks)] for vm, disks in self.deployment(name)["instances"]]
            self.table("instances", ["VM CID", "Disk CIDs"], rows)

    def do_snapshots(self, deployment: str) -> None:
        self.table("snapshots", ["CID"], [[one["snapshot_cid"]] for one in self.deployment(deployment)["snapshots"]])

    def do_deploy(self, given: argparse.Namespace, deployment: str) -> None:
        assert deployment
        self.do_files(given)

    def do_vms(self) -> None:
        for name in self.state["deployments"]:
            self.table("vms", ["VM CID"], [[vm["cid"]] for vm in self.deployment(name)["vms"]])

    def do_files(self, given: argparse.Namespace) -> None:
        """Check that every file named on the command line exists."""
        for path in [given.file, *given.ops, *(one.partition("=")[2] for one in given.var_file)]:
            if not (self.directory / path).is_file():
                raise CliError(f"open {path}: no such file or directory")
        for one in given.var:
            name, mark, value = one.partition("=")
            if not (name and mark):
                raise CliError(f"Expected var '{one}' to be in format 'name=value'")
            if value.startswith("file://") and not (self.directory / value.removeprefix("file://")).is_file():
                raise CliError(f"open {value}: no such file or directory")

    do_create_env = do_update_cpi_config = do_update_cloud_config = do_upload_stemcell = do_files


def _parser() -> argparse.ArgumentParser:
    parser = _GoFlagsParser(prog="bosh", add_help=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_GoFlagsParser)
    with_files = ("create-env", "update-cpi-config", "update-cloud-config", "deploy", "upload-stemcell")
    for name in ("curl", "instances", "snapshots", "vms", *with_files):
        one = commands.add_parser(name, add_help=False, allow_abbrev=False)
        one.add_argument("--json", action="store_true")
        one.add_argument("-n", "--non-interactive", action="store_true")
        one.add_argument("-d", "--deployment", default="")
        if name == "curl":
            one.add_argument("path")
        if name == "instances":
            one.add_argument("--details", action="store_true")
        if name in with_files:
            one.add_argument("file")
            one.add_argument("-o", dest="ops", action="append", default=[])
            one.add_argument("-v", dest="var", action="append", default=[])
            one.add_argument("--var-file", action="append", default=[])
        if name == "create-env":
            one.add_argument("--state")
            one.add_argument("--vars-store")
    return parser


def answer(argv: list[str], state: dict[str, Any], directory: Path, deployment: str) -> tuple[int, str]:
    """Return the exit code and the output of a command.

    ``state`` is the content of the Director's database, ``directory`` the working directory, and ``deployment`` the
    value of `BOSH_DEPLOYMENT`, which may be empty.
    """
    # Move global options after the command. The CLI also accepts them before it, but argparse does not.
    while argv and argv[0] in ("-d", "-n", "--json"):
        taken = 2 if argv[0] == "-d" else 1
        argv = [*argv[taken:], *argv[:taken]]
    cli = _Cli(state, directory, deployment)
    try:
        cli.run(argv)
        cli.output["Lines"].append("Succeeded")
        code = 0
    except CliError as exc:
        cli.output["Lines"] += [str(exc), "Exit code 1"]
        code = 1
    return code, json.dumps(cli.output, indent=4) + "\n"
