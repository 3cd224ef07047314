"""Checks that only ``host.guarded`` opens paths that a job can influence.

Every other function that opens a path is listed here with a reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from tests.support.source import Module, modules

CALLS = frozenset(
    {"open", "os.open", "os.stat", "os.lstat", "os.scandir", "os.listdir", "os.walk", "os.readlink", "os.access"}
    | {"os.truncate", "os.path.exists", "os.path.isfile", "os.path.isdir", "os.path.getsize", "os.path.getmtime"}
    | {"glob.glob", "glob.iglob", "io.open", "shutil.copyfile", "shutil.copy", "shutil.move", "tempfile.mkstemp"}
)
"""Functions that access a path and follow symlinks in it, at least in its parent directories."""

METHODS = frozenset(
    {"read_text", "read_bytes", "open", "iterdir", "glob", "rglob", "walk", "stat", "lstat", "exists", "is_file"}
    | {"is_dir", "is_symlink", "is_fifo", "readlink", "write_text", "write_bytes", "touch", "samefile"}
)
"""Methods of ``Path`` that access the path and follow symlinks in it, at least in its parent directories."""

MODULES = frozenset({"os", "io", "proc", "guarded", "files", "glob", "entry"})
"""Names of modules and directory entries, whose attributes may have the same names as ``Path`` methods. The modules'
functions are in CALLS.
"""

OUTSIDE = frozenset({"cli.check", "cli.deployment", "cli.kubernetes", "cli.render", "cli.try_release"})
"""Modules of commands that read files chosen by their user, with that user's rights."""


@dataclass(frozen=True)
class Raw:
    """The functions in one module that are allowed to open paths directly, and the reason."""

    why: str
    functions: frozenset[str] = field(default_factory=frozenset)


# These reasons for opening a path directly apply to several functions:
OWN = "only root writes there: below bosh, monit, instance or the state backup"
BUNDLES = "installed by root below directories of root, where jobs can only read"
KERNEL = "files of the kernel or the image"
SCRATCH = "only root writes there: below data/tmp or the agent's run directory, under names that the agent chose"
NAMED = "the path comes from the user who runs the command, or from the configuration"
PROBE = "checks whether something exists, without reading or writing it"

RAW: Mapping[str, Raw] = {
    "actions.jobs": Raw(BUNDLES, frozenset({"monit_files"})),
    "bulk.blobs": Raw(SCRATCH, frozenset({"Blobs._fetch", "Blobs.put"})),
    "bulk.compression": Raw("a file that is already open", frozenset({"_Piped.__init__"})),
    "bulk.providers": Raw(NAMED, frozenset({"Dav.put", "External.get", "Local._copy", "open_blob"})),
    "bulk.transfer": Raw(PROBE, frozenset({"Transfer._keeping"})),
    "cli.probe": Raw(OWN, frozenset({"_live"})),
    "daemon.boot": Raw(OWN, frozenset({"_mount_tmpfs", "make_tree"})),
    "supervisor.monit.control_file": Raw(OWN, frozenset({"_take"})),
    "services.bosh_env": Raw(OWN, frozenset({"_move_to_memory"})),
    "host.keeper": Raw(
        "sockets and spec files that only the agent uses; checks whether a program exists",
        frozenset({"_bind", "_cannot_run", "_connect", "_names", "spec_file"}),
    ),
    "cli.bpm": Raw(
        "methods of a log that is opened by host.guarded, and the path of the agent's own socket",
        frozenset({"_logs", "_may_ask", "_run"}),
    ),
    "services.bundles": Raw(
        BUNDLES,
        frozenset(
            {
                "Bundles._activate",
                "Bundles._create",
                "Bundles._keep_only",
                "Bundles._link_all",
                "Bundles._make_job_dirs",
                "Bundles._remove_strays",
                "Bundles._uninstall",
                "Bundles.delete_source",
                "Bundles.fetch_small",
                "Bundles.install",
                "Bundles.missing",
                "Bundles._sweep",
            }
        ),
    ),
    "edges.bus.https": Raw(SCRATCH, frozenset({"_open"})),
    "edges.bus.nats": Raw("a method of the bus connection", frozenset({"NatsBus._attempt"})),
    "edges.bus.tls": Raw(OWN, frozenset({"load_pair"})),
    "services.trusted_cas": Raw(KERNEL, frozenset({"_holds", "_is_stale", "_write"})),
    "daemon.job_recovery": Raw(OWN, frozenset({"JobRecovery._take_over"})),
    "daemon.orderly_stop": Raw(OWN, frozenset({"OrderlyStop.run"})),
    "cli.commands": Raw(
        "checks which jobs have a log directory; /dev/null; files of the program",
        frozenset({"_completion", "_refuse_missing", "main"}),
    ),
    "cli.compile_release": Raw(KERNEL, frozenset({"stemcell_slug"})),
    "services.compiler": Raw(BUNDLES, frozenset({"Compiler._remove_sources", "Compiler.compile", "_quote"})),
    "services.disks.mounting": Raw(
        "mount points and links that root creates; disks.markers reads volumes through host.guarded",
        frozenset(
            {
                "DiskMounts._disk",
                "DiskMounts._mount_point",
                "DiskMounts.absence",
                "DiskMounts.carry_out",
                "DiskMounts.look",
            }
        ),
    ),
    "services.disks.service": Raw(PROBE, frozenset({"Disks.dynamic_places"})),
    "services.dns": Raw(KERNEL, frozenset({"lines_naming"})),
    "cli.doctor": Raw(
        KERNEL,
        frozenset({"_clock", "_directories", "_kernel", "_name_servers", "_space"}),
    ),
    "services.volume_lease": Raw(OWN, frozenset({"_open_lock_file"})),
    "daemon.handback": Raw(OWN, frozenset({"_disks", "_jobs", "hand_back"})),
    "bulk.archive": Raw(
        "a new directory of the agent, by descriptor, with O_EXCL and O_NOFOLLOW",
        frozenset({"_UnpackedTree.add_file", "_unpack"}),
    ),
    "host.job_cgroups": Raw(
        KERNEL,
        frozenset(
            {
                "JobCgroup.make",
                "JobCgroup.members",
                "_below",
                "_type",
                "_forbid_swap",
                "_enable_below",
                "_kill_as_group",
                "offered",
            }
        ),
    ),
    "host.capabilities": Raw(KERNEL, frozenset({"privileges"})),
    "host.trusted_path": Raw(
        "host.guarded uses it to follow a path safely; it opens no file for reading or writing", frozenset({"hold"})
    ),
    "host.user_namespace": Raw(KERNEL, frozenset({"is_inside", "overflow_user"})),
    "host.cgroups": Raw(KERNEL, frozenset({"_text", "end_oom_group", "find"})),
    "bulk.copytree": Raw(
        "the top directory of a volume, which tar copies", frozenset({"_empty", "_is_ours", "_make_directories"})
    ),
    "host.files": Raw(
        "creates, writes and removes the agent's own files",
        frozenset(
            {
                "_empty",
                "_without_files",
                "_write_in_place",
                "behind",
                "is_empty",
                "move_away",
                "read",
                "remove_leftovers",
                "remove_tree",
                "replacing",
                "swap_link",
                "write_atomic",
                "sweep",
                "sync_directory",
                "sync_filesystem",
                "version",
            }
        ),
    ),
    "host.sandbox_exec": Raw(
        "runs in the process that becomes the job; opens each path once and mounts it by descriptor",
        frozenset(
            {
                "reset_oom_score",
                "_enter",
                "_is_our_link",
                "_join",
                "_make_point",
                "make_shared",
                "_mask",
                "_close_input",
                "_run_below_init",
            }
        ),
    ),
    "host.host_stats": Raw(KERNEL, frozenset({"load"})),
    "host.tree_namespace": Raw(KERNEL, frozenset({"_make_place", "show_as_vcap"})),
    "host.mounts": Raw(KERNEL, frozenset({"is_mount_point", "mounts"})),
    "host.hostname": Raw(KERNEL, frozenset({"obstacle"})),
    "host.network": Raw(KERNEL, frozenset({"listeners", "is_of_machine"})),
    "bulk.packing": Raw(
        "directories that the agent names; everything below them is opened by host.guarded",
        frozenset(
            {
                "_ArchiveWriter._add_open",
                "_ArchiveWriter.finish",
                "Sink.__init__",
                "_ArchiveWriter.open",
                "_listed",
                "pack",
            }
        ),
    ),
    "host.proc": Raw(
        KERNEL,
        frozenset(
            {
                "_has_children_files",
                "read",
                "executable",
                "boot_id",
                "incarnation",
                "_numbers",
                "open_files",
                "has_our_root",
                "uses.of_one",
                "uses.found",
            }
        ),
    ),
    "host.process": Raw(
        "cgroup files and the process's own name; checks whether a program exists",
        frozenset({"_cannot_run", "take_name"}),
    ),
    "host.pseudo_terminal": Raw(KERNEL, frozenset({"open_pair"})),
    "bulk.copytruncate": Raw(
        "in a directory that host.guarded has opened, by descriptor, without following links",
        frozenset({"_is_there"}),
    ),
    "host.privilege_probes": Raw(SCRATCH, frozenset({"change_owner", "open_for_writing", "user_namespace", "write"})),
    "host.volumes": Raw(
        "mount points and links that root creates, and the kernel's list of their users",
        frozenset(
            {"_loop_devices", "flags_to_set", "holders", "is_directory", "is_there", "show", "shows", "take_away"}
        ),
    ),
    "services.logs.tail": Raw(
        "the standard output; a method of a log that is opened by host.guarded", frozenset({"Follower._open", "stream"})
    ),
    "services.logs.log_file": Raw("a method of a log that is opened by host.guarded", frozenset({"LogFile.chunks"})),
    "cli.bpm_logs": Raw("a method of a log that is opened by host.guarded", frozenset({"Log.open"})),
    "core.log": Raw(OWN, frozenset({"_File._open", "_is_written_by_svlogd"})),
    "services.logs.archives": Raw(SCRATCH, frozenset({"_tidy"})),
    "services.state_backup": Raw(
        OWN,
        frozenset({f"StateBackup.{name}" for name in ("_has_copies", "_is_continued", "_move", "_restore", "_update")})
        | {"_empty"},
    ),
    "cli.monit": Raw(NAMED, frozenset({"_check", "_require_control_file", "main"})),
    "cli.release_tarball": Raw(
        "named by the caller; the blobs directory, where only root writes", frozenset({"_opened", "_write_packages"})
    ),
    "services.resolver": Raw(KERNEL, frozenset({"_belongs_to_resolved"})),
    "daemon.endings": Raw(NAMED, frozenset({"write_termination_log"})),
    "services.scripts": Raw(
        SCRATCH, frozenset({"Scripts._jobs_with_script", "Scripts._log_directory", "Scripts.errand", "shown"})
    ),
    "services.sshd": Raw(OWN, frozenset({"Sshd._have_host_key", "Sshd._truncate_log"})),
    "daemon.standalone": Raw(NAMED, frozenset({"Standalone._is_deployed", "_members", "_version"})),
    "supervisor.bpm_runner": Raw(
        "bpm.yml is in a bundle; checks whether volumes exist, which the sandbox opens itself",
        frozenset(
            {
                "Bpm._note",
                "_make_kept",
                "Bpm._make_directories",
                "Bpm._memory_limit",
                "Bpm._packages_elsewhere",
                "Bpm._binds",
                "Bpm.kill_hogs",
                "Bpm.rows",
                "_matching",
                "_require_volumes",
            }
        ),
    ),
    "supervisor.path_checks": Raw(
        "size, owner and age of the target of a job's link; the content is read through host.guarded",
        frozenset({"PathWatch.look"}),
    ),
    "supervisor.ownership.process_finder": Raw(PROBE, frozenset({"ProcessFinder.look_at_path"})),
    "supervisor.ctl_programs": Raw(
        SCRATCH, frozenset({"Programs.directory", "Programs.trim", "_cut", "Programs.printed"})
    ),
    "supervisor.supervisor": Raw(OWN, frozenset({"Supervisor.job_state", "Supervisor.recover"})),
    "services.users": Raw(KERNEL, frozenset({"Users._has_password", "Users._accounts"})),
    "services.vitals": Raw(KERNEL, frozenset({"Vitals._age"})),
    "bulk.install": Raw(SCRATCH, frozenset({"_newest", "finish"})),
    "bulk.worker": Raw(SCRATCH, frozenset({"_rotate", "become_worker"})),
    "bulk.workers": Raw(SCRATCH, frozenset({"_count"})),
}
"""Functions that open paths which no job can influence, or that use files which ``host.guarded`` has opened."""


def openings(module: Module) -> Iterator[tuple[str, int, str]]:
    """Yield every access to a path in a module: the enclosing function with its class ("" at module level), the line,
    and the name that is called.
    """
    aliases = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "os.path", "glob", "shutil", "io", "tempfile")
        for alias in node.names
    }

    def visit(node: ast.AST, where: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
        for child in ast.iter_child_nodes(node):
            inner = where
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*where, child.name)
            elif (isinstance(child, ast.Name) and (name := aliases.get(child.id, child.id)) in CALLS) or (
                isinstance(child, ast.Attribute) and (name := _opening(child))
            ):
                yield ".".join(where), child.lineno, name
            yield from visit(child, inner)

    yield from visit(module.tree, ())


def _opening(node: ast.Attribute) -> str:
    full = ast.unparse(node)
    if full in CALLS:
        return full
    is_module = isinstance(node.value, ast.Name) and node.value.id in MODULES
    return f".{node.attr}" if node.attr in METHODS and not is_module else ""


def violations(module: Module, raw: Mapping[str, Raw]) -> Iterator[str]:
    """Yield the accesses to paths for which no reason is listed."""
    if {module.name, module.top} & OUTSIDE or module.name == "host.guarded":
        return
    allowed = raw[module.name].functions if module.name in raw else frozenset()
    for function, line, name in openings(module):
        if function not in allowed:
            where = function or "the module"
            yield f"{module.name}:{line} uses {name} in {where}: use host.guarded, or add a reason to RAW"


def test_job_writable_files_are_opened_only_through_host_guarded() -> None:
    assert [wrong for module in modules().values() for wrong in violations(module, RAW)] == []


def test_listed_reasons_for_direct_opens_are_still_needed() -> None:
    there = {name: {function for function, _, _ in openings(module)} for name, module in modules().items()}

    assert [
        f"{name}.{function}" for name, raw in RAW.items() for function in raw.functions - there.get(name, set())
    ] == []
    assert all(raw.why for raw in RAW.values())


@pytest.mark.attack("root in a container damages files that the agent reads at boot")
def test_agent_reads_its_own_files_with_size_and_type_limits() -> None:
    own = [(name, raw.functions) for name, raw in RAW.items() if raw.why == OWN]

    assert [
        f"{name}:{line} uses {how} in {function}: use files.read(…, is_own=True)"
        for name, functions in own
        for function, line, how in openings(modules()[name])
        if function in functions and how in {".read_text", ".read_bytes"}
    ] == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def f(path):\n    return open(path)", "bundles:2 uses open in f"),
        ("import os\ndef f(path):\n    return os.open(path, os.O_RDONLY)", "uses os.open in f"),
        ("from os import scandir as look\ndef f(path):\n    return look(path)", "uses os.scandir in f"),
        ("def f(path):\n    return path.read_bytes()", "uses .read_bytes in f"),
        ("class A:\n    def f(self):\n        return self.path.stat().st_size", "uses .stat in A.f"),
        ("from pathlib import Path\nFOUND = list(Path('/x').iterdir())", "uses .iterdir in the module"),
        ("def f(path):\n    return lambda: path.exists()", "uses .exists in f"),
        ("def f(path, run):\n    return run(path.read_text)", "uses .read_text in f"),
    ],
)
def test_direct_open_of_a_file_is_detected(text: str, complaint: str) -> None:
    """Accesses through an alias, through a method, or through a reference that is not called must also be detected."""
    found = list(violations(Module("services.bundles", text), {}))

    assert len(found) == 1
    assert complaint in found[0]
    assert list(violations(Module("services.bundles", text), {"services.bundles": Raw("", frozenset({"g"}))})) == found


def test_direct_open_with_a_listed_reason_passes() -> None:
    text = "def f(path):\n    return open(path)"

    assert list(violations(Module("services.bundles", text), {"services.bundles": Raw("why", frozenset({"f"}))})) == []
