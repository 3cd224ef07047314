"""Limits of containers: the consequence of each, and the change that removes it.

A change has three forms if the places differ: for a pod, for a CPI outside of Kubernetes, and for docker and podman.
The second names ``cloud_properties`` of the Docker CPI (keys of Docker's HostConfig). Texts may contain ``{words}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agent_shim.cli.doctor.finding import CLOUD_PROPERTIES, GOOD, LIMITED, WRONG, Limit

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - that very directory

NEEDED: Final = {
    "CHOWN": "files cannot be given to vcap",
    "DAC_OVERRIDE": "files of vcap cannot be written by the agent",
    "FOWNER": "modes of files of vcap cannot be set",
    "SETUID": "jobs cannot run as vcap",
    "SETGID": "jobs cannot run as vcap",
    "KILL": "processes of vcap cannot be stopped",
}
"""Capabilities that root needs to run jobs as another user."""
USEFUL: Final = {
    "NET_BIND_SERVICE": "jobs (and sshd) cannot listen on ports below 1024",
    "SYS_CHROOT": "sshd cannot confine itself: bosh ssh does not work",
    "AUDIT_WRITE": "log-ins are refused where PAM asks for an audit: bosh ssh may not work",
}
STRONG: Final = {
    "SYS_ADMIN": "no mounts: see mounts",
    "SYS_PTRACE": "what a process of another user left behind is found by its parent alone, not by its environment",
    "SYS_RESOURCE": "jobs cannot have higher limits than the container has",
    "NET_ADMIN": "jobs cannot set up interfaces, routes and packet filters",
    "NET_RAW": "jobs cannot ping",
    "IPC_LOCK": "jobs cannot keep secrets out of swap (vault, credhub)",
}
"""Capabilities that containers of CPIs usually have, and pods rarely."""
KERNEL_FEATURES: Final = {
    "pidfd": "ends of processes that were adopted are noticed by looking, up to a second late",
    "Landlock": "processes of bpm.yml are not confined to their files",
    "pressure stall information": "memory pressure is invisible until memory runs out",
}

_SECURITY: Final = "securityContext"
_CPI: Final = CLOUD_PROPERTIES
_PRIVILEGED_BY_CPI: Final = "an engine that runs as root on the CPI's host and withholds nothing: the CPI asks for all"
"""The Docker and warden CPIs create privileged containers and ignore ``cloud_properties`` for this."""
_DNS: Final = "dns of the network in the cloud-config"
_OUT: Final = "firewall that lets port 4222 out; is the Director's NATS up?"
_ROTATE: Final = "rotate it: a deploy with new certificates, or recreate the instance"
_DOOR: Final = "make another (cloud_provider.cert in the manifest of create-env) and run create-env"
_ROOM: Final = "a larger volume, or room"


def capabilities(*names: str, follows: str, more: str = "", verdict: str = LIMITED) -> Limit:
    """Return the limit of a container without these capabilities."""
    options = " ".join(f"--cap-add={name}" for name in names)
    pod = f"{_SECURITY}.capabilities.add: [{', '.join(names)}]{more}"
    return Limit(verdict, follows, pod, cpi=f"{_PRIVILEGED_BY_CPI}{more}", engine=f"{options}{more}")


LIMITS: Final[Mapping[str, Limit]] = {
    "one user": Limit(
        LIMITED,
        "agent and jobs are one user: a job can read what the agent knows; pre-start scripts that need root fail; "
        "no bosh ssh",
        f"{_SECURITY}.runAsUser: 0, where that is allowed",
        cpi="an image without USER",
        engine="--user=0",
    ),
    "no other user": capabilities(
        "CHOWN", "SETGID", "SETUID", follows="no job that runs as vcap starts", verdict=WRONG
    ),
    "no capabilities": Limit(LIMITED, USEFUL["NET_BIND_SERVICE"], "none without root"),
    "few capabilities": Limit(
        LIMITED,
        "{lost}",
        f"{_SECURITY}.capabilities.add, for jobs that need one of them",
        cpi=f"{_PRIVILEGED_BY_CPI}, for jobs that need one of them",
        engine="--cap-add=NAME, for jobs that need one of them",
    ),
    "no new privileges": Limit(
        LIMITED,
        "sudo, su and other setuid programs do nothing, for jobs and in bosh ssh",
        f"{_SECURITY}.allowPrivilegeEscalation: true, where sudo is needed",
        cpi=f"{_CPI}: SecurityOpt without no-new-privileges, where sudo is needed",
        engine="no --security-opt=no-new-privileges, where sudo is needed",
    ),
    "no vcap": Limit(
        WRONG, "jobs cannot run as vcap", "an image with the overlay of this project, or `useradd -u 1000 vcap`"
    ),
    "no login programs": Limit(LIMITED, "no bosh ssh", "an image with passwd and openssh-server"),
    "other vcap": Limit(
        LIMITED, "files of volumes from other hosts have other owners here", "give vcap the number 1000"
    ),
    "no mounts": Limit(
        LIMITED,
        "a persistent disk is shown by a link (scripts that ask `mountpoint /var/vcap/store` see none); jobs that "
        "mount (nfs volumes, garden) fail; what env.bosh wants in memory is on disk",
        f"{_SECURITY}.privileged: true, or mount the volume on /var/vcap/store itself",
        cpi=_PRIVILEGED_BY_CPI,
        engine="--privileged, or --volume=NAME:/var/vcap/store",
    ),
    "no isolation": Limit(
        LIMITED,
        "a process of bpm.yml can read the files of other jobs that vcap can read",
        "a node with Linux 5.13 or newer and Landlock, and a seccomp profile that allows it (RuntimeDefault does)",
    ),
    "no cgroups": Limit(
        LIMITED,
        "memory and processor in heartbeats are the host's; kills by the memory limit go unreported",
        "mount /sys/fs/cgroup (read-only is enough)",
        cpi="the property mount_cgroupfs of the CPI",
        engine="--volume=/sys/fs/cgroup:/sys/fs/cgroup:ro",
    ),
    "cgroups read-only": Limit(
        GOOD, "limits.memory of bpm.yml is kept by a watchdog that looks once a second, limits.processes is not"
    ),
    "no memory limit": Limit(
        LIMITED,
        "one job can take the memory of the whole machine; heartbeats tell the machine's memory",
        "resources.limits.memory",
        cpi=f"{_CPI}: Memory: BYTES",
        engine="--memory=SIZE",
    ),
    "few open files": Limit(
        LIMITED,
        "jobs that want more open files get these (bpm.yml limits.open_files is often 65536 or 100000)",
        "the default ulimits of the container runtime on the node (LimitNOFILE)",
        cpi=f"{_CPI}: Ulimits: [{{{{Name: nofile, Soft: 1048576, Hard: 1048576}}}}]",
        engine="--ulimit=nofile=1048576:1048576",
    ),
    "volume not writable": Limit(
        WRONG,
        "{needs} cannot be kept there",
        "a volume mounted on {path}, writable by this user (fsGroup for a user that is not root)",
        cpi=f"{_CPI}: ReadonlyRootfs: false, Mounts without ReadOnly",
        engine="--volume=NAME:{path}, writable by this user",
    ),
    "volume noexec": Limit(
        WRONG,
        "no program of a job or package runs there",
        "a volume on {path} that is mounted without noexec",
        cpi=f"{_CPI}: no Tmpfs or Mounts on {{path}} with noexec",
        engine="--volume=NAME:{path} without noexec",
    ),
    "no volume": Limit(
        LIMITED,
        "{needs} are gone with the container",
        "a volume mounted on {path}",
        cpi="a persistent disk of the instance group; the CPI brings the volume for /var/vcap/data",
        engine="--volume=NAME:{path}",
    ),
    "top directory not writable": Limit(
        LIMITED,
        "{needs}",
        "an emptyDir on {path}",
        cpi=f"{_CPI}: ReadonlyRootfs: false",
        engine="--tmpfs={path}",
    ),
    "directory not writable": Limit(
        LIMITED,
        "{needs}",
        "readOnlyRootFilesystem: false",
        cpi=f"{_CPI}: ReadonlyRootfs: false",
        engine="no --read-only",
    ),
    "disk full": Limit(WRONG, "state cannot be written: a deploy fails", _ROOM),
    "disk nearly full": Limit(LIMITED, "a package may not fit in any more", _ROOM),
    "little shared memory": Limit(
        LIMITED,
        "databases that share memory between processes (postgres) may fail when they need more",
        f"an emptyDir with medium: Memory on {SHARED_MEMORY}",
        cpi=f"{_CPI}: ShmSize: BYTES",
        engine="--shm-size=SIZE",
    ),
    "old kernel": Limit(LIMITED, "{lost}", "a newer kernel on the node, or a runtime class with fewer restrictions"),
    "no inotify": Limit(
        LIMITED,
        "the agent does not use it; jobs that watch files fail or poll",
        "sysctl fs.inotify.max_user_instances=1024 on the node",
    ),
    "no init": Limit(
        LIMITED,
        "an agent that ends may not be started again, and SIGTERM to the container may not stop the jobs in order",
        "command: [/opt/agent_shim/launch, …] or /sbin/init; shareProcessNamespace: false",
        cpi=f"{_CPI}: no Init, no PidMode",
        engine="/sbin/init as the command; no --init, no --pid=host",
    ),
    "wrong year": Limit(WRONG, "certificates are not good yet: no bus", "the time of the node"),
    "other uptime": Limit(
        GOOD, "nothing here: ages come from the kernel; scripts that use /proc/uptime may be surprised"
    ),
    "no time server": Limit(
        LIMITED,
        "it may drift until certificates and logs do not fit; a container cannot set it",
        "a time server on the node",
    ),
    "bus certificate not yet valid": Limit(WRONG, "no connection to the bus", "the time of the node is wrong"),
    "bus certificate expired": Limit(WRONG, "the Director does not reach this instance any more", _ROTATE),
    "bus certificate near its end": Limit(
        LIMITED,
        "afterwards the Director does not reach this instance any more",
        "rotate the certificates of the Director's NATS and deploy",
    ),
    "door certificate not yet valid": Limit(WRONG, "the bosh CLI refuses it", "the time of the node is wrong"),
    "door certificate expired": Limit(WRONG, "the bosh CLI refuses it", _DOOR),
    "door certificate near its end": Limit(LIMITED, "afterwards the bosh CLI refuses it", _DOOR),
    "port taken": Limit(WRONG, "the agent runs without it", "another port in agent.json, or for the other program"),
    "port refused": Limit(LIMITED, "the agent runs without it", "another port"),
    "no low ports": capabilities(
        "NET_BIND_SERVICE",
        follows="routers, DNS servers and sshd cannot listen on their usual ports",
        more=" or sysctl net.ipv4.ip_unprivileged_port_start=0",
    ),
    "own names unknown": Limit(
        WRONG,
        "jobs do not find themselves; sudo and bosh ssh wait for name servers",
        "/etc/hosts writable for the agent, which completes it at the boot",
    ),
    "no name server": Limit(
        WRONG, "names are not found", "dnsPolicy and dnsConfig of the pod", cpi=_DNS, engine="--dns=ADDRESS"
    ),
    "bus name unknown": Limit(
        WRONG,
        "the bus cannot be found",
        "dnsPolicy: ClusterFirst, a NetworkPolicy that lets port 53 out, or an address in the settings",
        cpi=f"{_DNS}, or an address of the bus instead of its name",
        engine="--dns=ADDRESS, or an address in the settings",
    ),
    "fixed name servers": Limit(
        LIMITED,
        "bosh-dns cannot put itself before them: /etc/resolv.conf cannot be written",
        "/etc/resolv.conf writable, where bosh-dns is deployed",
    ),
    "address missing": Limit(
        WRONG,
        "other instances look for this one at the wrong place",
        "`bosh recreate` this instance, or give the pod its address again",
        cpi="`bosh recreate` this instance",
        engine="--ip=ADDRESS",
    ),
    "no default route": Limit(
        LIMITED,
        "dynamic networks get no address",
        "hostNetwork or a CNI network",
        cpi="name of the network in cloud_properties of the subnet",
        engine="--network=NAME",
    ),
    "bus not reached": Limit(
        WRONG,
        "the Director does not reach this instance",
        f"a NetworkPolicy or {_OUT}",
        cpi=f"a {_OUT}",
        engine=f"a {_OUT}",
    ),
    "no firewall": capabilities(
        "NET_ADMIN",
        follows="a job that has got hold of a certificate of the bus can use it",
        more=", an image with nftables, a network of its own",
    ),
}
"""Each limit by its name."""
