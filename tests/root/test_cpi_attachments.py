"""Tests the program that attachment pods use to mount disks into running VMs. The mounts are real.

Each test has a node, a VM that sees one of the node's directories, and helpers. A helper is a process that runs the
program under test.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubernetes_cpi import attachment_program, attachments
from kubernetes_cpi.config import Timeouts
from tests.support.own_cgroups import joining, own_cgroups
from tests.support.source import ROOT

pytestmark = pytest.mark.root

LIMIT_S = 30
PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
from kubernetes_cpi import attachment_program as program
vm = sys.argv[2].split(",")
program.processes = lambda uid: (
    int(pid) for pid in (vm if uid == "uid" else uid.split(",")) if os.path.exists(f"/proc/{pid}/ns")
)
program.DISK = sys.argv[3] + "/disk"
program.DONE = sys.argv[3] + "/done"
program.main(sys.argv[4:])
"""
NODE = """
set -e
mount --bind "$0" "$0" && mount --make-shared "$0"
mkdir -p "$0/disk" "$0/bosh/vm" && mount -t tmpfs disk "$0/disk" && echo kept >"$0/disk/file"
echo ready && read -r _
"""
VM = """
mount --make-rslave / && mount --rbind "$0/bosh/vm" "$1" && mount -o remount,bind,ro "$1" && umount -l "$0"
echo ready && exec sh -i 2>/dev/null
"""


class AttachmentNode:
    """A node and a VM, each with its own mount namespace. Mounts that are made below ``bosh/vm`` on the node appear in
    the VM.
    """

    def __init__(self, directory: Path, *, userns: bool = False) -> None:
        self.place, self.seen, self.spare = (directory / name for name in ("node", "seen", "spare"))
        self.target = str(self.place / "bosh/vm/disk-1")
        self.program = PROGRAM
        for path in (self.place, self.seen, self.spare):
            path.mkdir()
        place = self.place
        self.node = self._start(["unshare", "-m", "--propagation", "private", "sh", "-c", NODE, str(place)])
        alone = ["unshare", "-m", "--propagation", "unchanged"]
        self.vm = self._start(self.on_node(*alone, "sh", "-c", VM, str(place), str(self.seen)))
        self.users: list[subprocess.Popen[str]] = []
        self.pids = [self.in_user_namespace() if userns else self.vm.pid]
        self.helpers: list[subprocess.Popen[str]] = []
        self.cgroup_of_helpers: list[tuple[Path, Path]] = []

    def in_user_namespace(self) -> int:
        """Start a process in a new user namespace and return its pid. Outside the namespace, its root is uid 100000."""
        made = subprocess.Popen(["unshare", "--user", "sleep", "999"], text=True)
        self.users.append(made)
        own = Path("/proc/self/ns/user").readlink()
        while Path(f"/proc/{made.pid}/ns/user").readlink() == own:
            time.sleep(0.01)
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{made.pid}/{kind}").write_text("0 100000 65536")
        return made.pid

    def on_node(self, *command: str) -> list[str]:
        """Return the command with a prefix that runs it in the node's mount namespace."""
        return ["nsenter", f"--mount=/proc/{self.node.pid}/ns/mnt", *command]

    def attach(self) -> subprocess.Popen[str]:
        """Start a helper and wait until it has mounted the disk."""
        started = self.start()
        assert started.stdout is not None
        assert started.stdout.readline() == "mounted\n"
        return started

    def start(self) -> subprocess.Popen[str]:
        """Start a helper that will mount the disk."""
        return self.helper("attach", str(self.place / "disk"), self.target, "uid")

    def detach(self, attachment: subprocess.Popen[str], patience: float = 0.5) -> str:
        """Run a helper that unmounts the disk that ``attachment`` has mounted.

        Return the helper's output, followed by "done" if the helper reported success, and by its exit code if it did
        not.
        """
        pid = str(attachment.pid)
        sign = self.place / "done"
        subprocess.run(self.on_node("rm", "-f", str(sign)), check=True)
        helper = self.helper("detach", self.target, "uid", pid, str(patience))
        while helper.poll() is None:
            if subprocess.run(self.on_node("test", "-e", str(sign))).returncode == 0:
                helper.kill()
                return f"{helper.communicate(timeout=LIMIT_S)[0]}done"
            time.sleep(0.01)
        return f"{helper.communicate(timeout=LIMIT_S)[0]}{helper.returncode}"

    def helper(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the helper program on the node and return its process."""
        program = [sys.executable, "-c", self.program, str(ROOT), ",".join(map(str, self.pids)), str(self.place)]
        command = joining(self.cgroup_of_helpers, self.on_node(*program, *arguments))
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.helpers.append(started)
        return started

    def in_vm(self, command: str) -> str:
        """Return the output of a command in the VM's shell."""
        assert self.vm.stdin is not None
        assert self.vm.stdout is not None
        self.vm.stdin.write(f"{command}; echo; echo end\n")
        self.vm.stdin.flush()
        return "".join(iter(self.vm.stdout.readline, "end\n")).strip()

    def process(self, *command: str) -> subprocess.Popen[str]:
        """Start another process in the VM and wait until it prints "ready"."""
        made = self._start(["nsenter", f"--mount=/proc/{self.vm.pid}/ns/mnt", *command])
        self.users.append(made)
        self.pids.append(made.pid)
        return made

    def end(self, attachment: subprocess.Popen[str]) -> str:
        """Send SIGTERM to an attachment. Return its output and exit code."""
        attachment.send_signal(signal.SIGTERM)
        out, _ = attachment.communicate(timeout=LIMIT_S)
        return f"{out}{attachment.returncode}"

    def mounts(self) -> int:
        """Return the number of mounts stacked on top of each other at the disk's mount point in the VM."""
        text = Path(f"/proc/{self.vm.pid}/mountinfo").read_text()
        return sum(1 for line in text.splitlines() if line.split()[4] == str(self.seen / "disk-1"))

    def close(self) -> None:
        for process in (*self.helpers, *self.users, self.vm, self.node):
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert made.stdout is not None
        assert made.stdout.readline() == "ready\n"
        return made


@pytest.fixture
def site(tmp_path: Path) -> Iterator[AttachmentNode]:
    site = AttachmentNode(tmp_path)
    yield site
    site.close()


def test_disk_is_attached_to_and_detached_from_a_running_vm(site: AttachmentNode) -> None:
    helper = site.attach()
    seen = f"{site.seen}/disk-1"

    assert site.in_vm(f"cat {seen}/file") == "kept"
    site.in_vm(f"echo new >{seen}/new")
    helper.send_signal(signal.SIGTERM)
    out, _ = helper.communicate(timeout=LIMIT_S)
    assert (out, helper.returncode) == ("unmounted\n", 0)
    assert site.mounts() == 0
    assert site.in_vm(f"ls {site.seen}") == "", "the next disk's data could be written to a plain directory"
    site.attach()
    assert site.in_vm(f"cat {seen}/new") == "new"


def test_attachment_helpers_finish_in_time_with_their_requested_cpu(site: AttachmentNode) -> None:
    """On a node whose CPUs are all busy, a container gets only the CPU time that it requests."""
    with own_cgroups("helper") as places:
        directory = with_cpu_controller([ours for ours, _ in places])
        site.cgroup_of_helpers = [(directory, directory)]
        allow_cpu(directory, attachments.CPU_OF_ATTACHMENT)
        attachment = site.attach()
        allow_cpu(directory, attachments.CPU)
        patience = Timeouts().unmount
        since = time.monotonic()

        assert site.detach(attachment, patience) == "unmounted\ndone"
        assert time.monotonic() - since < patience
        attachment.kill()
        attachment.wait()


def with_cpu_controller(directories: list[Path]) -> Path:
    """Return the first cgroup in ``directories`` that has a CPU controller. Skip the test if none has."""
    for directory in directories:
        if any((directory / name).exists() for name in ("cpu.cfs_quota_us", "cpu.max")):
            return directory
    pytest.skip("no CPU quota can be set here: neither cpu.cfs_quota_us nor cpu.max in a cgroup of this process")


def allow_cpu(directory: Path, request: str) -> None:
    """Limit a cgroup to the CPU time that a container gets for ``request``, such as ``50m``."""
    quota_us, period_us = int(request.removesuffix("m")) * 1000, 1_000_000
    if (directory / "cpu.max").exists():
        (directory / "cpu.max").write_text(f"{quota_us} {period_us}")
    else:
        (directory / "cpu.cfs_period_us").write_text(f"{period_us}")
        (directory / "cpu.cfs_quota_us").write_text(f"{quota_us}")


def test_attachment_after_a_killed_helper_does_not_stack_mounts(site: AttachmentNode) -> None:
    first = site.attach()
    first.kill()
    first.wait()
    assert site.mounts() == 1

    site.attach()

    assert site.mounts() == 1


@pytest.mark.attack("root in a container that the CPI created redirects a disk mount")
@pytest.mark.parametrize("planted", ["ln -s ../other/disk-2 {}", "touch {}"])
def test_attach_does_not_follow_a_link_that_the_vm_put_at_the_disk_directory(
    site: AttachmentNode, planted: str
) -> None:
    others = site.place / "bosh/other/disk-2"
    site.in_vm(f"mount -o remount,bind,rw {site.seen}")
    site.in_vm(planted.format(site.seen / "disk-1"))
    subprocess.run(site.on_node("mkdir", "-p", str(others)), check=True)

    helper = site.start()
    out, _ = helper.communicate(timeout=LIMIT_S)

    assert "cannot mount the disk: something in the VM has put a link or a file at" in out
    assert helper.returncode == 1
    assert str(others) not in Path(f"/proc/{site.node.pid}/mountinfo").read_text()


def test_disk_is_not_left_mounted_in_a_directory_that_the_vm_moved(site: AttachmentNode) -> None:
    """The VM moves the mount point's directory away during the mount. A later detach would look for the disk at the old
    path and leave it mounted.
    """
    moving = "os.rename(program.sys.argv[-2], program.sys.argv[-2] + '-moved')"
    mount = f"real = program.mount\ndef mount(*args):\n    {moving}\n    real(*args)\nprogram.mount = mount\n"
    site.program = PROGRAM.replace("program.main(", f"{mount}program.main(")

    out, _ = site.start().communicate(timeout=LIMIT_S)

    assert out == f"cannot mount the disk: the VM has moved {site.target} meanwhile\n"
    assert site.target not in Path(f"/proc/{site.node.pid}/mountinfo").read_text()


def test_detach_does_not_unmount_a_disk_in_use(site: AttachmentNode) -> None:
    helper = site.attach()
    site.in_vm(f"exec 9>>{site.seen}/disk-1/file")

    helper.send_signal(signal.SIGTERM)
    assert helper.stdout is not None
    assert helper.stdout.readline() == "cannot unmount the disk yet: the VM uses it\n"
    helper.send_signal(signal.SIGTERM)
    assert site.mounts() == 1
    site.in_vm("echo last >&9; exec 9>&-")
    out, _ = helper.communicate(timeout=LIMIT_S)

    assert (out, helper.returncode) == ("unmounted\n", 0)
    assert (site.mounts(), site.in_vm("true")) == (0, "")


@pytest.mark.attack("root in a container that the CPI created redirects a disk mount")
def test_vm_can_write_to_its_disks_but_not_to_their_parent_directory(site: AttachmentNode) -> None:
    """The directory with the mount points is on the node's file system, which the VM must not be able to fill."""
    site.attach()

    assert "Read-only" in site.in_vm(f"touch {site.seen}/beside 2>&1")
    assert site.in_vm(f"touch {site.seen}/disk-1/new && echo written") == "written"


def test_failed_detach_keeps_the_attachment(site: AttachmentNode) -> None:
    attachment = site.attach()
    site.in_vm(f"exec 9>>{site.seen}/disk-1/file")

    assert site.detach(attachment) == (
        "cannot unmount the disk yet: the VM uses it\ncannot unmount the disk within 0.5 s: the VM uses it\n1"
    )
    assert (site.mounts(), attachment.poll()) == (1, None)
    site.in_vm("echo last >&9; exec 9>&-")
    assert site.detach(attachment) == "unmounted\ndone"
    assert (site.mounts(), site.in_vm(f"ls {site.seen}")) == (0, "")
    assert site.end(attachment) == "unmounted\n0"


HIDINGS = {
    "bound elsewhere": ["mount --bind {0.seen}/disk-1 {0.spare}"],
    "a part bound elsewhere": ["mkdir {0.seen}/disk-1/part", "mount --bind {0.seen}/disk-1/part {0.spare}"],
    "moved away, the directory renamed": [
        "mount -o remount,bind,rw {0.seen}",
        "mount --move {0.seen}/disk-1 {0.spare}",
        "mv {0.seen}/disk-1 {0.seen}/other",
    ],
    "moved within, the directory renamed": [
        "mount -o remount,bind,rw {0.seen}",
        "mkdir {0.seen}/deep",
        "mount --move {0.seen}/disk-1 {0.seen}/deep",
        "mv {0.seen}/disk-1 {0.seen}/other",
    ],
    "cut off from the node": ["mount --make-rprivate {0.seen}"],
    "bound on a name that is no text": [
        "place={0.spare}/$(printf 'x\\377'); mkdir -p $place && mount --bind {0.seen}/disk-1 $place"
    ],
    "bound elsewhere, on a later line that says otherwise": [
        "mount --bind {0.seen}/disk-1 {0.spare}",
        "number=$(grep ' {0.spare} ' /proc/self/mountinfo | cut -d' ' -f1)",
        "place={0.spare}s/$(printf 'x\\r%s\\v1\\v0:1\\v/\\v/y' $number); mkdir -p $place && mount -t tmpfs none $place",
    ],
}


@pytest.mark.attack("root in a container that the CPI created keeps using a disk that is reported as detached")
@pytest.mark.parametrize("commands", HIDINGS.values(), ids=HIDINGS.keys())
def test_disk_kept_mounted_by_the_vms_root_user_is_not_reported_as_unmounted(
    site: AttachmentNode, commands: list[str]
) -> None:
    """The VM has mounted the disk at a second path, through which it can still write to the disk."""
    attachment = site.attach()
    for command in commands:
        assert "fail" not in site.in_vm(f"{command.format(site)} || echo fail")

    assert site.detach(attachment).endswith("the VM uses it\n1")
    assert site.detach(attachment).endswith("the VM uses it\n1")
    attachment.send_signal(signal.SIGTERM)
    assert attachment.stdout is not None
    assert attachment.stdout.readline() == "cannot unmount the disk yet: the VM uses it\n"
    site.vm.kill()
    site.vm.wait()
    out, _ = attachment.communicate(timeout=LIMIT_S)

    assert (out, attachment.returncode) == ("unmounted\n", 0)
    table = Path(f"/proc/{site.node.pid}/mountinfo").read_text()
    assert [line for line in table.splitlines() if " - tmpfs disk " in line and "/bosh/" in line] == []


THREAD = """
import ctypes, threading
libc = ctypes.CDLL(None, use_errno=True)
def hide():
    failed = libc.unshare(0x00020000 | 0x200) or libc.mount(None, b"/", None, 0x44000, None)
    print("failed" if failed else "ready", flush=True)
    threading.Event().wait()
threading.Thread(target=hide).start()
"""
CLONE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
tree = libc.syscall(428, -100, sys.argv[1].encode(), 1)
if sys.argv[2] == "as a clone for a directory":
    os.fchdir(tree)
    os.close(tree)
print("ready" if tree >= 0 else "failed", flush=True)
sys.stdin.read()
"""


@pytest.mark.attack("root in a container that the CPI created keeps using a disk that is reported as detached")
@pytest.mark.parametrize("way", ["in a thread's namespace", "as a clone in a descriptor", "as a clone for a directory"])
def test_disk_mounted_outside_all_mount_tables_is_not_reported_as_unmounted(site: AttachmentNode, way: str) -> None:
    """The VM keeps a mount of the disk with open_tree or unshare. No mount table shows that mount, but the VM can still
    write to the disk.
    """
    attachment = site.attach()
    program = CLONE if "clone" in way else THREAD
    keeper = site.process(sys.executable, "-c", program, str(site.seen / "disk-1"), way)

    assert site.detach(attachment).endswith("the VM uses it\n1")

    assert site.mounts() == 1
    keeper.kill()
    keeper.wait()
    assert site.detach(attachment) == "unmounted\ndone"


PARTS = """
mkdir "$0/disk/data" "$0/disk/log" "$0/part" "$0/bosh/vm/log"
mount --bind "$0/disk/log" "$0/bosh/vm/log"
mount --bind "$0/disk/data" "$0/part"
umount "$0/disk"
mount --bind "$0/part" "$0/disk"
"""
JAILED = """
exec 9>>"$0/file"
exec unshare -m sh -c 'umount "$0" "${0%/*}/disk-1" && echo ready && exec cat' "$0"
"""


def test_open_files_on_other_mounts_of_the_device_do_not_block_a_detach(site: AttachmentNode) -> None:
    """A disk can be a directory in a larger file system."""
    subprocess.run(site.on_node("sh", "-ec", PARTS, str(site.place)), check=True)
    attachment = site.attach()
    site.process("sh", "-c", JAILED, str(site.seen / "log"))

    assert site.detach(attachment) == "unmounted\ndone"


ENDED = """
import ctypes, threading
ready = threading.Event()
def wait():
    ready.wait()
    print("ready", flush=True)
    threading.Event().wait()
threading.Thread(target=wait).start()
ready.set()
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.attack("root in a container that the CPI created keeps using a disk that is reported as detached")
def test_process_with_an_exited_main_thread_still_belongs_to_the_vm() -> None:
    """With cgroup v1, an exited main thread belongs to no cgroup, so the helper must look at the process's other
    threads.
    """
    with own_cgroups("pod") as places:
        uid = places[0][0].name
        of_v1 = [place for place in places if not (place[1] / "cgroup.controllers").exists()]
        command = joining(of_v1 or places, [sys.executable, "-c", ENDED])
        keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == "ready\n"
            until_zombie(keeper.pid)

            assert list(attachment_program.processes(uid)) == [keeper.pid]
        finally:
            keeper.kill()
            keeper.communicate()


def until_zombie(pid: int) -> None:
    """Wait until a process's main thread has exited."""
    deadline = time.monotonic() + LIMIT_S
    while attachment_program.start_of(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_failed_detach_of_a_bind_mounted_disk_never_hides_its_files(site: AttachmentNode) -> None:
    """The helper must not unmount the disk and mount it again after a failure, because processes in the VM
    would see an empty directory in the meantime.
    """

    def numbers() -> list[str]:
        table = Path(f"/proc/{site.vm.pid}/mountinfo").read_text().splitlines()
        return [line.split()[0] for line in table if line.split()[4] == str(site.seen / "disk-1")]

    attachment = site.attach()
    site.in_vm(f"mount --bind {site.seen}/disk-1 {site.spare}")
    before = numbers()

    assert site.detach(attachment).endswith("the VM uses it\n1")

    assert numbers() == before


@pytest.mark.attack("root in a container that the CPI created keeps using a disk that is reported as detached")
def test_renamed_disk_directory_does_not_block_a_detach(site: AttachmentNode) -> None:
    attachment = site.attach()
    moved = "mount -o remount,bind,rw {0.seen} && umount {0.seen}/disk-1 && mv {0.seen}/disk-1 {0.seen}/other"
    assert site.in_vm(f"{moved.format(site)} && echo moved") == "moved"

    assert site.detach(attachment) == "unmounted\ndone"

    assert str(site.place / "bosh/vm/other") not in Path(f"/proc/{site.node.pid}/mountinfo").read_text()


def test_empty_directories_of_deleted_vms_are_removed_later(site: AttachmentNode, tmp_path: Path) -> None:
    """The kubelet creates a directory for each VM to which disks can be attached while the VM is running."""
    for name in ("gone", "full"):
        subprocess.run(site.on_node("mkdir", "-p", f"{site.place}/bosh/{name}"), check=True)
    subprocess.run(site.on_node("touch", f"{site.place}/bosh/full/file"), check=True)
    sweep = PROGRAM.replace("program.main(sys.argv[4:])", "program.STALE_S = -1; program.sweep(sys.argv[4])")
    command = [sys.executable, "-c", sweep, str(ROOT), "0", str(site.place), f"{site.place}/bosh"]

    subprocess.run(site.on_node(*command), check=True)

    left = subprocess.run(site.on_node("ls", f"{site.place}/bosh"), capture_output=True, text=True, check=True)
    assert left.stdout.split() == ["full", "vm"], "the VM has its empty directory mounted"


def test_mount_table_shared_by_many_processes_is_read_once(
    site: AttachmentNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the table for each process would take six seconds on a node with sixteen thousand mounts and a job with a
    hundred processes.
    """
    crowd = [site.process("sh", "-c", "echo ready; exec sleep 999") for _ in range(5)]
    jailed = site.process("unshare", "-m", "sh", "-c", "echo ready; exec sleep 999")

    tasks = [str(one.pid) for one in (site.vm, *crowd, jailed)]

    assert list(attachment_program.different_tables(tasks)) == [tasks[0], tasks[-1]]


MANY_MOUNTS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
place = sys.argv[1].encode()
assert libc.mount(b"none", place, b"tmpfs", 0, None) == 0
assert libc.mount(None, b"/", None, 0x44000, None) == 0
for number in range(12):
    # Each bind mount doubles the number of mounts, whose paths are up to two kilobytes long.
    below = b"%b/%b%d" % (place, b"x" * 220, number)
    os.mkdir(below)
    assert libc.mount(place, below, None, 0x5000, None) == 0
print("ready", flush=True)
sys.stdin.read()
"""
MEASURED = """
program.STALE_S = -1
program.main(sys.argv[4:])
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.parametrize("whose", ["neighbour", "vm"])
def test_attach_helper_needs_little_memory_for_a_large_mount_table(site: AttachmentNode, whose: str) -> None:
    """An unprivileged process can create a huge number of mounts in a user namespace. If a helper's memory usage grew
    with their number, every helper on the node would exceed its memory limit.
    """
    site.program = PROGRAM.replace("program.main(sys.argv[4:])", MEASURED)
    subprocess.run(site.on_node("mkdir", f"{site.place}/bosh/gone"), check=True)
    many = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", MANY_MOUNTS, str(site.spare)]
    crowded = site.process(*many)
    if whose == "neighbour":
        site.pids.remove(crowded.pid)
    assert len(Path(f"/proc/{crowded.pid}/mountinfo").read_bytes()) > 5 << 20

    attachment = site.attach()
    deadline = time.monotonic() + LIMIT_S
    while "gone" in subprocess.run(site.on_node("ls", f"{site.place}/bosh"), capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    said, kilobytes, code = site.end(attachment).split("\n")

    assert (said, code) == ("unmounted", "0")
    assert int(kilobytes) < 20_000, "the interpreter alone needs 12 MB"


UNANSWERED = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
device = os.open("/dev/fuse", os.O_RDWR)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device
assert libc.mount(b"fuse", sys.argv[1].encode(), b"fuse", 0, options) == 0
opened = os.open(sys.argv[1], os.O_PATH)
if sys.argv[2] == "unmounted lazily":
    assert libc.umount2(sys.argv[1].encode(), 2) == 0
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["mounted", "unmounted lazily"])
def test_hanging_file_system_does_not_delay_a_detach(site: AttachmentNode, state: str) -> None:
    """The helper must not call stat(2) on a file that a job has open, because the call would wait for the file system
    and could not be interrupted.
    """
    attachment = site.attach()
    site.process(sys.executable, "-c", UNANSWERED, str(site.spare), state)

    assert site.detach(attachment, LIMIT_S) == "unmounted\ndone"


def test_disk_directory_of_a_deleted_vm_is_removed(site: AttachmentNode) -> None:
    helper = site.attach()
    site.vm.kill()
    site.vm.wait()

    helper.send_signal(signal.SIGTERM)
    helper.communicate(timeout=LIMIT_S)

    left = subprocess.run(site.on_node("ls", f"{site.place}/bosh"), capture_output=True, text=True)
    assert left.stdout == ""


def test_disk_is_writable_in_the_vms_user_namespace(tmp_path: Path) -> None:
    """Without an idmapped mount, root's files would belong to uid 65534, and the VM could not write to the disk."""
    site = AttachmentNode(tmp_path, userns=True)
    try:
        helper = site.attach()

        assert site.in_vm(f"stat -c %u {site.seen}/disk-1/file") == "100000"
        helper.send_signal(signal.SIGTERM)
        out, _ = helper.communicate(timeout=LIMIT_S)
        assert (out, helper.returncode) == ("unmounted\n", 0)
    finally:
        site.close()


@pytest.mark.attack(
    "root in a container that the CPI created interferes with a mount through its user namespace or process name"
)
def test_attachment_tolerates_process_names_that_are_not_valid_text(tmp_path: Path) -> None:
    site = AttachmentNode(tmp_path, userns=True)
    try:
        job = site.process("perl", "-e", '$| = 1; $0 = "\\xff"; print "ready\\n"; sleep 600')

        site.attach()

        assert not attachment_program.is_first(job.pid)
    finally:
        site.close()


@pytest.mark.attack(
    "root in a container that the CPI created interferes with a mount through its user namespace or process name"
)
def test_disk_is_not_mounted_with_the_ids_of_a_jobs_user_namespace(site: AttachmentNode) -> None:
    """The disk must be mounted with the ids of the VM's namespace, because otherwise its files would not belong to root
    in the VM.
    """
    job = site.in_user_namespace()
    # Start times are only as precise as a clock tick, so try again until the two processes have different ones.
    while attachment_program.start_of(job) == attachment_program.start_of(site.vm.pid):
        job = site.in_user_namespace()
    site.pids.insert(0, job)

    site.attach()

    assert site.in_vm(f"stat -c %u {site.seen}/disk-1/file") == "0"


def test_init_in_a_jobs_pid_namespace_is_not_mistaken_for_the_containers_pid_1() -> None:
    """On a reboot, only the container's PID 1 must get signals so that the agent can stop the jobs in order."""
    nested = "unshare --pid --fork --kill-child sleep 999 & exec sleep 999"
    container = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", nested])
    try:
        while len(firsts := inits_below(container.pid)) < 2:
            time.sleep(0.01)

        assert [attachment_program.is_first(pid) for pid in firsts] == [True, False]
    finally:
        container.kill()
        container.wait()


@pytest.mark.parametrize("heeds", [True, False])
def test_reboot_helper_stops_the_containers_pid_1(site: AttachmentNode, heeds: bool) -> None:
    script = ("trap 'exit 7' TERM; " if heeds else "") + "echo; sleep 999 & wait"
    container = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", script], stdout=-1, stderr=subprocess.DEVNULL
    )
    assert container.stdout is not None
    container.stdout.readline()
    site.pids += map(int, Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split())

    helper = site.helper("reboot", "uid", str(LIMIT_S if heeds else 0.1))

    assert (helper.communicate(timeout=LIMIT_S)[0], helper.returncode) == ("ended\n", 0)
    assert (container.wait(LIMIT_S) == 7) is heeds
    container.stdout.close()


def inits_below(pid: int) -> list[int]:
    """Return the descendants of a process that are PID 1 in a namespace, outermost first."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines())
        found += [child] if status["NSpid"].split()[-1] == "1" and status["Name"].strip() == "sleep" else []
        found += inits_below(child)
    return found
