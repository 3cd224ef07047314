"""Lists the limits that containers may have, each with its consequence and the change that removes it.

A change has up to four forms: for a pod, for a CPI outside of Kubernetes, for docker and podman, and for the LXD CPI.
The form for a CPI names the Docker CPI's ``cloud_properties`` (keys of Docker's HostConfig). Consequences and changes
may contain placeholders such as ``{name}``. If a change to the pod's manifest is sufficient and gives the pod no more
power than the agent needs, the change is also available as a patch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agent_shim.cli.doctor.finding import CLOUD_PROPERTIES, LIMITED, NO_PATCH, WRONG, Consequence

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - only checked

NEEDED: Final = {
    "CHOWN": "files cannot be chowned to vcap",
    "DAC_OVERRIDE": "files of vcap cannot be written by the agent",
    "FOWNER": "modes of files of vcap cannot be set",
    "SETUID": "jobs cannot run as vcap",
    "SETGID": "jobs cannot run as vcap",
    "KILL": "processes of vcap cannot be stopped",
}
"""Capabilities that root needs to run jobs as another user, and the consequence if one is missing."""
USEFUL: Final = {
    "NET_BIND_SERVICE": "jobs (and sshd) cannot listen on ports below 1024",
    "SYS_CHROOT": "sshd cannot confine itself: bosh ssh does not work",
    "AUDIT_WRITE": "logins are refused where PAM requires audit records: bosh ssh may not work",
}
STRONG: Final = {
    "SYS_ADMIN": "no mounts: see mounts",
    "SYS_PTRACE": "processes that keep a disk busy are not found; the watchdog of limits.memory counts shared memory "
    "once per process",
    "SYS_RESOURCE": "jobs cannot have higher limits than the container has",
    "NET_ADMIN": "jobs cannot set up interfaces, routes and packet filters",
    "NET_RAW": "jobs cannot ping",
    "IPC_LOCK": "jobs cannot keep secrets out of swap (vault, credhub)",
}
"""Capabilities that CPIs usually grant to containers but that pods rarely have, and the consequence if one is missing.
"""
KERNEL_FEATURES: Final = {
    "pidfd": "exits of adopted processes are detected by polling, up to a second late",
    "Landlock": "processes of bpm.yml are not confined to their files",
    "pressure stall information": "memory pressure is invisible until memory runs out",
}

_PRIVILEGED_BY_CPI: Final = (
    "an engine that runs as root on the CPI's host and grants all capabilities (the CPI requests all)"
)
"""The suggested change if a CPI's container lacks capabilities. The Docker and warden CPIs always create privileged
containers, so only the engine can withhold capabilities, and ``cloud_properties`` have no effect.
"""

_TABLE: Final = """
one user = limited: agent and jobs run as the same user, so a job can read all files of the agent; pre-start scripts
    that need root fail; no bosh ssh
  pod: securityContext.runAsUser: 0, where that is allowed
  cpi: an image without USER
  engine: --user=0
no capabilities = limited: jobs (and sshd) cannot listen on ports below 1024
  pod: not possible without root
few capabilities = limited: {lost}
  pod: securityContext.capabilities.add, for jobs that need one of them
  cpi: an engine that runs as root on the CPI's host and grants all capabilities (the CPI requests all), for jobs that
    need one of them
  engine: --cap-add=NAME, for jobs that need one of them
  lxd: cloud_properties of the VM: config: {{security.privileged: "true"}}, and no lxc.cap.drop in raw.lxc, for jobs
    that need one of them
no new privileges = limited: sudo, su and other setuid programs do nothing, for jobs and in bosh ssh
  pod: securityContext.allowPrivilegeEscalation: true, where sudo is needed
  cpi: cloud_properties of the VM: SecurityOpt without no-new-privileges, where sudo is needed
  engine: no --security-opt=no-new-privileges, where sudo is needed
  lxd: cloud_properties of the VM: config: raw.lxc without lxc.no_new_privs = 1, where sudo is needed
no vcap = wrong: jobs cannot run as vcap
  pod: an image with the overlay of this project, or `useradd -u 1000 vcap`
no login programs = limited: no bosh ssh
  pod: an image with passwd and openssh-server
other vcap = limited: files on volumes from other hosts have a different owner here
  pod: give vcap the uid 1000
no mounts = limited: a persistent disk is reachable through a link, so `mountpoint /var/vcap/store` fails in scripts;
    jobs that mount (nfs volumes, garden) fail; directories that env.bosh wants in memory are on disk
  pod: securityContext.privileged: true, or mount the volume on /var/vcap/store itself
  cpi: an engine that runs as root on the CPI's host and grants all capabilities (the CPI requests all)
  engine: --privileged, or --volume=NAME:/var/vcap/store
  lxd: cloud_properties of the VM: config: {{security.nesting: "true"}}, or security.privileged
no mounts beside a volume = limited: jobs that mount (nfs volumes, garden) fail; directories that env.bosh wants in
    memory are on disk
  pod: securityContext.privileged: true, for such jobs
  cpi: an engine that runs as root on the CPI's host and grants all capabilities (the CPI requests all)
  engine: --privileged, for such jobs
  lxd: cloud_properties of the VM: config: {{security.nesting: "true"}}, or security.privileged
no isolation = limited: a process of bpm.yml can read the files of other jobs that vcap can read
  pod: a node with Linux 5.13 or newer and Landlock, and a seccomp profile that allows it (RuntimeDefault does)
no cgroups = limited: memory and processor in heartbeats are the host's; kills by the memory limit go unreported
  pod: mount /sys/fs/cgroup (read-only is enough)
  cpi: the property mount_cgroupfs of the CPI
  engine: --volume=/sys/fs/cgroup:/sys/fs/cgroup:ro
  lxd: cloud_properties of the VM: config: raw.lxc with lxc.mount.auto = cgroup:mixed
cgroups read-only = good: limits.memory of bpm.yml is enforced by a watchdog once a second; limits.processes is not
    enforced
no cgroups, lxcfs = limited: kills by the memory limit go unreported
  pod: mount /sys/fs/cgroup (read-only is enough)
  lxd: cloud_properties of the VM: config: raw.lxc with lxc.mount.auto = cgroup:mixed
kills together = limited: when memory runs out, the kernel kills the agent and all jobs, not only the process that uses
    too much memory
  pod: singleProcessOOMKill: true in the configuration of the node's kubelet, or cgroup_writable = true in that of
    containerd 2.1, or securityContext.privileged: true; with the last two, the agent turns it off
  cpi: an engine that does not set memory.oom.group on containers
  engine: 0 in memory.oom.group of the container's cgroup
no memory limit = limited: one job can use up the memory of the whole machine; heartbeats report that machine's memory
  pod: resources.limits.memory
  cpi: cloud_properties of the VM: Memory: BYTES
  engine: --memory=SIZE
  lxd: cloud_properties of the VM: instance_type, or config: {{limits.memory: SIZE}}
few open files = limited: jobs cannot open more files than this (limits.open_files of bpm.yml is often 65536 or
    100000)
  pod: the default ulimits of the container runtime on the node (LimitNOFILE)
  cpi: cloud_properties of the VM: Ulimits: [{{Name: nofile, Soft: 1048576, Hard: 1048576}}]
  engine: --ulimit=nofile=1048576:1048576
  lxd: cloud_properties of the VM: config: {{limits.kernel.nofile: "1048576"}}
volume not writable = wrong: {needs} cannot be kept there
  pod: a volume mounted on {path}, writable by this user (fsGroup for a user that is not root)
  cpi: cloud_properties of the VM: ReadonlyRootfs: false, Mounts without ReadOnly
  engine: --volume=NAME:{path}, writable by this user
  lxd: cloud_properties of the VM: devices without readonly: "true"
no data volume, read-only = wrong: {needs} cannot be kept there
  pod: a volume mounted on {path}; an emptyDir lasts as long as the pod
  cpi: cloud_properties of the VM: ReadonlyRootfs: false
  engine: --volume=NAME:{path}
  lxd: cloud_properties of the VM: no readonly: "true" of the device root
volume noexec = wrong: no program of a job or package runs there
  pod: a volume on {path} that is mounted without noexec
  cpi: cloud_properties of the VM: no Tmpfs or Mounts on {path} with noexec
  engine: --volume=NAME:{path} without noexec
  lxd: cloud_properties of the VM: no raw.mount.options=noexec of a device
no volume = limited: {needs} are lost with the container
  pod: a volume mounted on {path}
  cpi: a persistent disk of the instance group; the CPI creates the volume for /var/vcap/data
  engine: --volume=NAME:{path}
no data volume = limited: {needs} are lost with the container
  pod: a volume mounted on {path}; an emptyDir lasts as long as the pod
  cpi: a persistent disk of the instance group; the CPI creates the volume for /var/vcap/data
  engine: --volume=NAME:{path}
top directory not writable = limited: {needs}
  pod: an emptyDir on {path}
  cpi: cloud_properties of the VM: ReadonlyRootfs: false
  engine: --tmpfs={path}
  lxd: cloud_properties of the VM: no readonly: "true" of the device root
directory not writable = limited: {needs}
  pod: readOnlyRootFilesystem: false
  cpi: cloud_properties of the VM: ReadonlyRootfs: false
  engine: no --read-only
  lxd: cloud_properties of the VM: no readonly: "true" of the device root
directory of another user = limited: {needs}
  pod: securityContext.runAsUser: 0, where that is allowed
  cpi: an image without USER
  engine: --user=0
disk full = wrong: state cannot be written, so deploys fail
  pod: a larger volume, or free some space
disk nearly full = limited: the next package may not fit
  pod: a larger volume, or free some space
little shared memory = limited: databases that share memory between processes (postgres) may fail when they need more
  pod: an emptyDir with medium: Memory on /dev/shm
  cpi: cloud_properties of the VM: ShmSize: BYTES
  engine: --shm-size=SIZE
  lxd: cloud_properties of the VM: config: raw.lxc with lxc.mount.entry = tmpfs dev/shm tmpfs size=BYTES,create=dir 0 0
old kernel = limited: {lost}
  pod: a newer kernel on the node, or a runtime class with fewer restrictions
no inotify = limited: the agent does not use it; jobs that watch files fail or poll
  pod: sysctl fs.inotify.max_user_instances=1024 on the node
no init = limited: the agent may not be restarted if it exits, and SIGTERM to the container may not stop the jobs in
    order
  pod: command: [/opt/agent_shim/launch, …] or /sbin/init; shareProcessNamespace: false
  cpi: cloud_properties of the VM: no Init, no PidMode
  engine: /sbin/init as the command; no --init, no --pid=host
  lxd: cloud_properties of the VM: config: raw.lxc without lxc.init.cmd
wrong year = wrong: certificates are not valid yet, so the bus cannot be reached
  pod: the correct time on the node
other uptime = good: no effect on the agent; scripts that read /proc/uptime get this value
no time server = limited: the clock may drift until certificates are rejected and log times are wrong; a
    container cannot set it
  pod: a time server on the node
bus certificate not yet valid = wrong: no connection to the bus
  pod: the correct time on the node
bus certificate expired = wrong: the Director can no longer reach this instance
  pod: rotate it: a deploy with new certificates, or recreate the instance
bus certificate near its end = limited: when it expires, the Director can no longer reach this instance
  pod: rotate the certificates of the Director's NATS and deploy
HTTPS certificate not yet valid = wrong: the bosh CLI refuses it
  pod: the correct time on the node
HTTPS certificate expired = wrong: the bosh CLI refuses it
  pod: create a new one (cloud_provider.cert in the manifest of create-env) and run create-env
HTTPS certificate near its end = limited: when it expires, the bosh CLI refuses it
  pod: create a new one (cloud_provider.cert in the manifest of create-env) and run create-env
no low ports without root = limited: routers, DNS servers and sshd cannot listen on their usual ports
  pod: securityContext.sysctls of the pod: net.ipv4.ip_unprivileged_port_start=0
  cpi: cloud_properties of the VM: Sysctls: {{net.ipv4.ip_unprivileged_port_start: "0"}}
  engine: --sysctl=net.ipv4.ip_unprivileged_port_start=0
  lxd: cloud_properties of the VM: config: {{linux.sysctl.net.ipv4.ip_unprivileged_port_start: "0"}}
port taken = wrong: the agent runs without metrics and probes
  pod: another port in agent.json, or for the other program
port refused = limited: the agent runs without metrics and probes
  pod: another port
own names unknown = wrong: the container cannot resolve its own name; sudo and bosh ssh wait for name servers
  pod: /etc/hosts writable for the agent, which adds the missing names at boot
no name server = wrong: no host name can be resolved
  pod: dnsPolicy and dnsConfig of the pod
  cpi: dns of the network in the cloud-config
  engine: --dns=ADDRESS
bus name unknown = wrong: the bus cannot be found
  pod: dnsPolicy: ClusterFirst, a NetworkPolicy that allows outgoing traffic to port 53, or an address in the settings
  cpi: dns of the network in the cloud-config, or an address of the bus instead of its name
  engine: --dns=ADDRESS, or an address in the settings
fixed name servers = limited: bosh-dns cannot add itself as the first name server, because /etc/resolv.conf cannot be
    written
  pod: /etc/resolv.conf writable, where bosh-dns is deployed
address missing = wrong: other instances connect to the wrong address
  pod: `bosh recreate` this instance, or give the pod its address again
  cpi: `bosh recreate` this instance
  engine: --ip=ADDRESS
  lxd: no DHCP server gave this address: `lxc network list-leases NAME` (with Incus: `incus`) shows
    what it gave. The subnet of the cloud-config has to be that of LXD's network
no default route = limited: dynamic networks get no address
  pod: hostNetwork or a CNI network
  cpi: name of the network in cloud_properties of the subnet
  engine: --network=NAME
bus not reached = wrong: the Director cannot reach this instance
  pod: a NetworkPolicy or firewall that allows outgoing traffic to port 4222; is the Director's NATS up?
  cpi: a firewall that allows outgoing traffic to port 4222; is the Director's NATS up?
  engine: a firewall that allows outgoing traffic to port 4222; is the Director's NATS up?
"""


def capabilities(*names: str, follows: str, more: str = "", verdict: str = LIMITED) -> Consequence:
    """Return the consequence for a container that lacks the capabilities ``names``. ``more`` is appended to each
    change. If one of the capabilities is ``STRONG``, there is no patch.
    """
    options = " ".join(f"--cap-add={name}" for name in names)
    pod = f"securityContext.capabilities.add: [{', '.join(names)}]{more}"
    lxd = f'{CLOUD_PROPERTIES}: config: {{security.privileged: "true"}}, and no lxc.cap.drop in raw.lxc{more}'
    needed = {"container": {"securityContext": {"capabilities": {"add": list(names)}}}}
    patch = NO_PATCH if STRONG.keys() & {*names} else needed
    return Consequence(
        verdict, follows, pod, cpi=f"{_PRIVILEGED_BY_CPI}{more}", engine=f"{options}{more}", lxd=lxd, patch=patch
    )


def _volume(kind: Mapping[str, str], path: str = "{path}", name: str = "{name}") -> Mapping[str, Any]:
    """Return the patch that mounts an emptyDir. ``kind`` contains the emptyDir's fields, and ``path`` and ``name`` may
    be placeholders. The volume's name has a prefix, so that it differs from the names of the pod's own volumes.
    """
    mount = {"mountPath": path, "name": f"agent-shim-{name}"}
    return {"container": {"volumeMounts": [mount]}, "volumes": [{"name": mount["name"], "emptyDir": kind}]}


PATCHES: Final[Mapping[str, Mapping[str, Any]]] = {
    "no data volume": _volume({}),
    "no data volume, read-only": _volume({}),
    "top directory not writable": _volume({}),
    "directory not writable": {"container": {"securityContext": {"readOnlyRootFilesystem": False}}},
    "little shared memory": _volume({"medium": "Memory", "sizeLimit": "256Mi"}, SHARED_MEMORY, "shm"),
}
"""Maps the name of a limit to its patch. Limits that cannot be removed with a patch are missing."""


def _rows(table: str) -> Iterator[tuple[str, Consequence]]:
    """Yield the name and content of each row. A row reads ``NAME = VERDICT: CONSEQUENCE``, followed by one line with
    the change for each kind of container.
    """
    for row in re.split(r"\n(?=\S)", table.strip()):
        head, *changes = (" ".join(part.split()) for part in re.split(r"\n  (?=\w+: )", row))
        name, _, rest = head.partition(" = ")
        verdict, _, follows = rest.partition(": ")
        texts: Mapping[str, Any] = dict(change.split(": ", 1) for change in changes)
        yield name, Consequence(verdict, follows, **texts, patch=PATCHES.get(name, NO_PATCH))


LIMITS: Final[Mapping[str, Consequence]] = {
    **dict(_rows(_TABLE)),
    "no other user": capabilities(
        "CHOWN", "SETGID", "SETUID", follows="no job that runs as vcap starts", verdict=WRONG
    ),
    "no low ports": capabilities(
        "NET_BIND_SERVICE",
        follows="routers, DNS servers and sshd cannot listen on their usual ports",
        more=" or sysctl net.ipv4.ip_unprivileged_port_start=0",
    ),
    "no firewall": capabilities(
        "NET_ADMIN",
        follows="a job that has obtained a bus certificate can use it",
        more=", an image with nftables, a network of its own",
    ),
}
"""Maps the name of each limit to its consequence."""
