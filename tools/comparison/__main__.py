"""``./dev compare-release PATH…``: run each job in the releases through the same lifecycle under both agents, and list
the differences.

PATH is a checkout of a release or its git directory. BOSH_AGENT and MONIT are the paths of the Go agent and monit
5.2.5. If BPM is set to the path of the real bpm, and runc and tini are installed, the Go agent uses them. Needs root
and ruby. docs/tested.md describes the phases, and docs/monit-deviations.md the allowed differences.
"""

from __future__ import annotations

import argparse
import compileall
import concurrent.futures
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import yaml

from agent_shim.demo.pki import Authority
from tests.support.machine import CODE, machine
from tools.comparison import breaks, judge, plan
from tools.comparison.releases import Checkout, Job

PROPERTIES: Final = Path(__file__).with_name("properties.yml")
"""File with values for those properties of public jobs that have no default and cannot be guessed."""
WORLDS: Final = ("go", "shim")
LIFE_LIMIT_S: Final = 1500
LOOK_S: Final = 0.5
INTERRUPTED: Final = threading.Event()
KINDS: Final = "equal, listed, difference, busy, unplayed"
TRIES: Final = 4
"""Maximum number of runs for a job that does not stay up. Each run adds stand-ins for whatever the job's scripts did
not find in the previous run.
"""
WITHOUT: Final = "-sys_time,-sys_boot,-sys_module,-sys_rawio,-syslog,-mac_admin,-mac_override,-audit_control"
"""Capabilities that neither environment gets, so that release scripts cannot affect this machine."""


def main() -> int:
    """Compare the jobs. Return 0 if there are no differences, or only those that are listed in
    docs/monit-deviations.md.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument(
        "--breaks", action="store_true", help="break this agent in each known way and check that each break is noticed"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="jobs to run at once (default: %(default)s)")
    parser.add_argument(
        "--cycle", type=int, default=10, metavar="SECONDS", help="monit's cycle in both environments (default: 10)"
    )
    parser.add_argument("--only", default="", metavar="JOB,…", help="run only these jobs")
    parser.add_argument(
        "--each", type=int, default=1000, metavar="N", help="run at most N jobs of each release (with processes first)"
    )
    parser.add_argument(
        "--properties", type=Path, help="YAML file with properties by RELEASE/JOB or JOB, which override the defaults"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIRECTORY",
        help="record the results of each environment there, and do not run jobs whose results are there already",
    )
    parser.add_argument(
        "--again", default=[], type=lambda words: words.split(","), metavar="KIND,…", help="run these again: " + KINDS
    )
    parser.add_argument("--counts", action="store_true", help="also print the number of jobs of each release")
    args = parser.parse_args()
    missing = [name for name in ("BOSH_AGENT", "MONIT") if not os.access(os.environ.get(name, ""), os.X_OK)]
    if missing or os.geteuid() != 0 or shutil.which("ruby") is None:
        parser.error(f"needs root, ruby, and programs in {' and '.join(missing) or 'BOSH_AGENT and MONIT'}")
    if not args.paths and not args.breaks:
        parser.error("needs a PATH or --breaks")
    values = yaml.safe_load(PROPERTIES.read_text())
    values |= yaml.safe_load(args.properties.read_text()) if args.properties else {}
    only = {name for name in args.only.split(",") if name}
    authority = Authority()
    key = authority.client("job").private_key
    kept = args.keep or Path(tempfile.mkdtemp(prefix="comparison-"))
    kept.mkdir(parents=True, exist_ok=True)
    # On SIGTERM, raise SystemExit, so that the `with` blocks remove the environments.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for package in ("agent_shim", "tools/comparison", "tests/support"):
        # Compile the modules now, because the environments cannot write to the source tree and would compile them at
        # each start.
        compileall.compile_dir(CODE / package, quiet=2)
    if args.breaks:
        model = next(Checkout(breaks.MODEL).jobs(values, authority.ca, key))
        return prove(plan.plan(Checkout(breaks.MODEL), model), args.cycle, kept, args.jobs)
    plans: list[plan.Plan] = []
    for path in args.paths:
        checkout = Checkout(path.resolve())
        found = [
            plan.plan(checkout, job) for job in checkout.jobs(values, authority.ca, key) if not only or job.name in only
        ]
        plans += sorted(found, key=lambda one: (not one.services, bool(one.job.error)))[: args.each]
    print(f"{len(plans)} jobs of {len(args.paths)} releases; results are recorded in {kept}", flush=True)
    begun_at = time.monotonic()
    verdicts: list[judge.Verdict] = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool, ending(pool):
        waiting = {pool.submit(compare, one, args.cycle, kept, args.again): one for one in plans}
        for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
            verdict = done.result()
            verdicts.append(verdict)
            print(f"{time.monotonic() - begun_at:7.0f} s  {number}/{len(plans)}  {verdict}", flush=True)
    print(judge.table(verdicts))
    if args.counts:
        print(judge.reasons(verdicts), judge.counts(verdicts), sep="\n")
    return int(any(verdict.differences for verdict in verdicts))


@contextmanager
def ending(pool: concurrent.futures.Executor) -> Iterator[None]:
    """On exit from the block, stop all running lifecycles and start no new ones.

    Otherwise, an interrupt would end the block while lifecycles continue.
    """
    try:
        yield
    finally:
        INTERRUPTED.set()
        pool.shutdown(wait=False, cancel_futures=True)


def compare(made: plan.Plan, cycle: int, kept: Path, again: Sequence[str] = ()) -> judge.Verdict:
    """Run a job under both agents concurrently, and compare the results.

    monit checks the services every ``cycle`` seconds. If an earlier run has recorded both results, the job is not run
    again.
    """
    if made.job.error:
        return judge.Verdict(made.job, not_rendered=made.job.error)
    place = kept / f"{made.job.release}+{made.job.name}".replace("/", "+")
    files = [place / f"{world}-result.json" for world in WORLDS]
    if all(file.exists() for file in files):
        verdict = judge.judge(made, *(json.loads(file.read_text()) for file in files))
        if (place / "verdict.json").exists():
            verdict.helped = json.loads((place / "verdict.json").read_text()).get("helped", [])
        if verdict.kind not in again and not (verdict.not_played and "unplayed" in again):
            return verdict
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for _ in range(TRIES):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            worlds = [pool.submit(live, world, made, cycle, place) for world in WORLDS]
        lives = [world.result() for world in worlds]
        if INTERRUPTED.is_set():
            shutil.rmtree(place)
            return judge.Verdict(made.job, not_played="interrupted")
        verdict = judge.judge(made, *lives)
        said = "\n".join(path.read_text(errors="replace") for path in place.glob("*-log/*"))
        called = judge.tools(lives[0])
        if verdict.not_played or (judge.is_unsteady(lives) and set(called) - set(made.lives)):
            if not plan.learn(made, said, called):
                break
        elif not (judge.lacks_a_process(lives) and plan.learn_paths(made, said)):
            break
    verdict.helped = made.lives + ["lenient"] * made.is_lenient
    (place / "verdict.json").write_text(json.dumps(verdict.document(), indent=1))
    return verdict


def prove(made: plan.Plan, cycle: int, kept: Path, at_once: int) -> int:
    """Compare each deliberately broken agent with the Go agent, and return 0 if the comparison detects every break.

    Up to ``at_once`` lifecycles run at the same time.
    """
    silent = 0
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool, ending(pool):
        go = pool.submit(live, "go", made, cycle, _emptied(kept / "go"))
        sound = pool.submit(live, "shim", made, cycle, _emptied(kept / "sound"))
        waiting = {}
        for name, broken in breaks.BREAKS.items():
            short = dataclasses.replace(made, trials=broken.trials)
            place = _emptied(kept / name.replace(" ", "-").replace("/", ""))
            waiting[name] = pool.submit(live, "shim", short, cycle, place, broken)
        verdict = judge.judge(made, go.result(), sound.result())
        print(f"{'sound':40} {verdict}", flush=True)
        silent += verdict.kind not in ("equal", "listed")
        for name, playing in waiting.items():
            verdict = judge.judge(made, _only(go.result(), playing.result()), playing.result())
            is_noticed = breaks.BREAKS[name].is_noticed(verdict)
            silent += not is_noticed
            print(f"{name:40} {'noticed' if is_noticed else f'NOT NOTICED: {verdict}'}", flush=True)
    print(f"{len(breaks.BREAKS)} breaks, {silent} wrong")
    return int(silent > 0)


def _emptied(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def _only(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return the lifecycle ``whole`` without the phases that are missing from ``part``."""
    names = {phase["name"] for phase in part["phases"]}
    return whole | {"phases": [phase for phase in whole["phases"] if phase["name"] in names]}


def _bpm(made: plan.Plan) -> dict[str, str]:
    """Return the paths of bpm, runc and tini by name, or an empty dict if the job runs with the stand-in for bpm.

    The stand-in is used if BPM is not set, or if the job has privileged processes, because the environment cannot grant
    all of their capabilities.
    """
    is_privileged = any((one.get("unsafe") or {}).get("privileged") for one in plan.processes(made.job))
    if not os.environ.get("BPM") or is_privileged:
        return {}
    return {"bpm": os.environ["BPM"]} | {name: shutil.which(name) or name for name in ("runc", "tini")}


def remove_containers(cgroups: list[tuple[Path, Path]]) -> None:
    """Remove the container cgroups that an environment has left behind in any hierarchy."""
    for ours, top in cgroups[:1]:
        for place in top.parent.glob(f"*/{ours.name}"):
            for below in (*sorted(place.rglob("*/"), reverse=True), place):
                with suppress(OSError):
                    below.rmdir()


def _keep_logs(kind: str, vcap: Path, place: Path) -> None:
    if (vcap / "monit/monit.log").exists():
        shutil.copy(vcap / "monit/monit.log", place / "go-monit.log")
    for path in vcap.glob("data/sys/log/*/*"):
        if path.is_file():
            (place / f"{kind}-log").mkdir(exist_ok=True)
            shutil.copy(path, place / f"{kind}-log" / path.name)


def live(kind: str, made: plan.Plan, cycle: int, place: Path, broken: breaks.Break | None = None) -> dict[str, Any]:
    """Run the lifecycle under one agent and return the recorded phases.

    If ``broken`` is given, a copy of this project's agent with that defect is used.
    """
    with tempfile.TemporaryDirectory(prefix="world-") as name:
        scratch = Path(name)
        programs = _bpm(made)
        names = [str(one.get("name")) for one in plan.processes(made.job)] if programs else []
        (scratch / "plan.json").write_text(plan.written(made, bpm="".join(names[:1])))
        if broken is not None:
            broken.copy(scratch / "broken")
        if kind == "go":
            shutil.copy(os.environ["BOSH_AGENT"], scratch / "bosh-agent")
            shutil.copy(os.environ["MONIT"], scratch / "monit")
            if programs:
                (scratch / "bpm").mkdir()
                for program, found in programs.items():
                    shutil.copy(found, scratch / "bpm" / program)
        with machine(scratch, has_network=True) as inside:
            argv = [sys.executable, "-m", f"{__package__}.life", kind, "/mnt/plan.json", "/mnt/result.json"]
            setting = [f"CYCLE={cycle}", f"PYTHONPATH={CODE}", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
            command = ["unshare", "--uts", "setpriv", f"--bounding-set={WITHOUT}", "env", "-i", *setting, *argv]
            with (scratch / "life.log").open("wb") as log:
                playing = inside.popen(command, stdout=log, stderr=log, cwd=CODE)
                give_up_at = time.monotonic() + LIFE_LIMIT_S
                while playing.poll() is None:
                    if INTERRUPTED.wait(LOOK_S) or time.monotonic() > give_up_at:
                        playing.kill()
            _keep_logs(kind, inside.vcap, place)
        remove_containers(inside.cgroups)
        for said in ("life.log", "agent.log", "result.json"):
            if (scratch / said).exists():
                shutil.copy(scratch / said, place / f"{kind}-{said}")
        if not (scratch / "result.json").exists():
            lines = (scratch / "life.log").read_text(errors="replace").strip().splitlines()[-1:]
            return {"world": kind, "error": f"the life did not end: {''.join(lines)}", "phases": []}
        document: dict[str, Any] = json.loads((scratch / "result.json").read_text())
        return document


__all__ = ["Job", "compare", "live"]

if __name__ == "__main__":
    sys.exit(main())
