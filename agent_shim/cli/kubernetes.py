"""``agent-shim render --kubernetes``: write the Kubernetes objects that run an instance group, as plain manifests.

Each pod renders its own instance in an init container, from the manifest in a Secret and the releases in an image, so
that its index, address and links are correct. The agent then runs as in ``deploy/kubernetes/base``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from agent_shim.cli.deployment import ERRAND, Group
from agent_shim.core.errors import ConfigError
from agent_shim.host import files

ADDRESSES: Final = "{group}-{index}.{group}"
"""The DNS names of the pods, which belong to the group's headless Service. This Service also publishes pods that are
not ready, because the pods wait for each other when they start.
"""
GROUP_ADDRESS: Final = "{group}-ready"
"""The DNS name of the Service that publishes only ready pods, just as bosh-dns returns only healthy instances."""
AGENT_PORT: Final = 9190
MAX_SECRET_BYTES: Final = 1024 * 1024
GRACE_S: Final = 50
CAPABILITIES: Final = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE"),
)
DNS_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
CONTAINERIZATION: Final = ("bosh_containerization", "quarks")
"""Job properties in which releases prepared for fissile and quarks list the job's ports."""

STATEFUL_SET: Final = """\
The instances start one after the other, as a Director updates them. There is no livenessProbe or startupProbe,
# because PID 1 restarts a dead agent, and a slow agent is no reason to end all jobs. The pod has a longer
# terminationGracePeriodSeconds than the timeout of the preStop hook and the agent's grace (configmap.yaml)."""
"""The comment at the top of statefulset.yaml. ``write`` adds the first ``#``."""
TEMPORARY: Final = "/tmp"  # noqa: S108 - the path of a mount

Document = dict[str, Any]


class JobPort(NamedTuple):
    """A job's port."""

    name: str
    number: int
    protocol: str = "TCP"


class ObjectInputs(NamedTuple):
    """The input from which the objects are generated. ``releases`` are paths below the image's build context."""

    deployment: str
    group: Group
    manifest: str
    releases: Sequence[str]
    image: str
    renderer: str
    ports: Sequence[JobPort]
    is_privileged: bool


def write(parts: ObjectInputs, out: Path) -> list[str]:
    """Write the manifests, a kustomization and the Dockerfile of the init container. Return the names of the files.

    Raises ``ConfigError`` for a group that cannot be represented in Kubernetes.
    """
    _check(parts)
    group = parts.group.name
    documents = {
        "configmap.yaml": ("The agent's options.", [_config_map(parts)]),
        "secret.yaml": (
            "The deployment manifest, which holds secrets. Only the init container reads it.",
            [_secret(parts)],
        ),
        "service.yaml": (
            f"{group}: names of all pods, even before they are ready. {group}-ready: only the ready pods.",
            [_service(parts, group, is_early=True), _service(parts, f"{group}-ready", is_early=False)],
        ),
        "statefulset.yaml": (
            STATEFUL_SET,
            [_stateful_set(parts)],
        ),
        "poddisruptionbudget.yaml": (
            "At most one instance is evicted at a time when nodes are drained.",
            [_budget(parts)],
        ),
        "kustomization.yaml": ("kubectl apply -k .", [_kustomization()]),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, (comment, content) in documents.items():
        text = yaml.dump_all(content, Dumper=_BlockDumper, sort_keys=False, width=120, allow_unicode=True)
        mode = 0o600 if name == "secret.yaml" else 0o644
        files.write_atomic(out / name, f"# {comment}\n{text}".encode(), mode=mode)
    files.write_atomic(out / "Dockerfile", _dockerfile(parts).encode())
    return [*documents, "Dockerfile"]


def ports(jobs: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]) -> list[JobPort]:
    """Return the jobs' ports: first the ports listed for fissile and quarks, then those link properties whose name is
    ``port`` or ends in ``_port``.

    ``jobs`` contains each job's properties, and the properties of each link that the job provides.
    """
    found: dict[tuple[int, str], JobPort] = {}
    for properties, provided in jobs:
        in_links = [port for link in provided for port in _in_link(link)]
        for name, number, protocol in [*_declared(properties), *in_links]:
            if 0 < number < 2**16 and (number, protocol) not in found:
                label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
                taken = {"agent", *(port.name for port in found.values())}
                # A port name has at most 15 characters and contains a letter. The agent's own port is named "agent".
                is_valid = 0 < len(label) <= 15 and re.search("[a-z]", label) and label not in taken
                found[number, protocol] = JobPort(
                    label if is_valid else f"{protocol.lower()}-{number}", number, protocol
                )
    return list(found.values())


def _declared(properties: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Yield the name, number and protocol of each port that a job's properties list for fissile and quarks. Raises
    ``ConfigError``.
    """
    for key in CONTAINERIZATION:
        about = properties.get(key)
        ports = (about.get("ports") if isinstance(about, dict) else None) or []
        if not isinstance(ports, list) or not all(isinstance(port, dict) for port in ports):
            raise ConfigError(f"cannot read {key}.ports: it is not a list of ports with `name` and `internal`: {ports}")
        for port in ports:
            numbers = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", str(port.get("internal", "")))
            if numbers is None:
                raise ConfigError(f"cannot read {key}.ports: `internal` is neither a port nor a port range: {port}")
            for number in range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1):
                yield str(port.get("name", "")), number, str(port.get("protocol", "TCP")).upper()


def _in_link(properties: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int, str]]:
    """Yield the name, number and protocol of each port in a link's properties, at any depth. ``path`` is the key of the
    mapping that contains ``properties``, or "" at the top.

    For example, ``{"tls": {"port": 443, "admin_port": 8443}}`` contains the ports ``tls`` and ``tls-admin``. The caller
    replaces names that are invalid in Kubernetes.
    """
    for key, value in properties.items():
        if isinstance(value, dict):
            yield from _in_link(value, key)
        elif re.search("(^|_)port$", key) and str(value).isdigit():
            yield (f"{path}-{key.removesuffix('_port')}" if key != "port" else path or key), int(value), "TCP"


def _check(parts: ObjectInputs) -> None:
    """Raise ``ConfigError`` for a group that cannot be represented in Kubernetes."""
    group = parts.group
    reason = ""
    if not DNS_LABEL.fullmatch(group.name):
        reason = "Services get its name, so it has at most 52 characters, only lower-case letters, digits and -"
    elif group.lifecycle == ERRAND:
        reason = "it is an errand, for which Kubernetes has Jobs"
    elif group.persistent_disk_type is not None:
        reason = "the size of its persistent_disk_type is in the cloud config; use `persistent_disk: MEBIBYTES` instead"
    elif group.persistent_disks:
        reason = "it has several persistent disks, but the agent supports only one in a pod"
    elif len(parts.manifest.encode()) > MAX_SECRET_BYTES - 1024:  # reserve 1 KiB for the rest of the Secret
        reason = "the manifest does not fit into a Secret (1 MiB); remove the groups that provide no link to it"
    if reason:
        raise ConfigError(f"cannot make a StatefulSet of the instance group {group.name}: {reason}")


def _metadata(parts: ObjectInputs, name: str) -> Document:
    # Kubernetes limits the characters and the length of a label's value.
    deployment = re.sub(r"[^-A-Za-z0-9_.]", "-", parts.deployment)[:63].strip("-_.")
    return {"name": name, "labels": {**_labels(parts), "app.kubernetes.io/instance": deployment}}


def _labels(parts: ObjectInputs) -> Document:
    return {"app.kubernetes.io/name": parts.group.name, "app.kubernetes.io/part-of": "agent-shim"}


def _pod_selector(parts: ObjectInputs) -> Document:
    """Return the labels that select the group's pods."""
    return {"app.kubernetes.io/name": parts.group.name}


def _config_map(parts: ObjectInputs) -> Document:
    """Return the ConfigMap with agent.json. ``/release`` is the directory into which the init container renders."""
    options = f'{{"AgentShim": {{"spec": "/release", "http": "0.0.0.0:{AGENT_PORT}", "grace": {GRACE_S}}}}}\n'
    metadata = _metadata(parts, f"{parts.group.name}-agent")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"agent.json": options}}


def _secret(parts: ObjectInputs) -> Document:
    metadata = _metadata(parts, f"{parts.group.name}-manifest")
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"manifest.yml": parts.manifest}}


def _service(parts: ObjectInputs, name: str, *, is_early: bool) -> Document:
    """Return a headless Service. If ``is_early`` is set, it also publishes pods that are not ready."""
    all_ports = [*parts.ports, JobPort("agent", AGENT_PORT)]
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": is_early,
        "selector": _pod_selector(parts),
        "ports": [
            {"name": port.name, "port": port.number, "targetPort": port.number, "protocol": port.protocol}
            for port in all_ports
        ],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(parts, name), "spec": spec}


def _budget(parts: ObjectInputs) -> Document:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _pod_selector(parts)}}
    metadata = _metadata(parts, parts.group.name)
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}


def _stateful_set(parts: ObjectInputs) -> Document:
    group = parts.group
    manifest_digest = hashlib.sha256(parts.manifest.encode()).hexdigest()[:16]
    template = {
        # When a pod starts, it renders the manifest, so the pods must be replaced when the manifest changes.
        "metadata": {"labels": _labels(parts), "annotations": {"agent-shim/manifest": manifest_digest}},
        "spec": _pod(parts),
    }
    spec: Document = {
        "serviceName": group.name,
        "replicas": group.count,
        "selector": {"matchLabels": _pod_selector(parts)},
        "template": template,
    }
    if group.persistent_disk:
        storage = {"requests": {"storage": f"{group.persistent_disk}Mi"}}
        claim = {"accessModes": ["ReadWriteOnce"], "resources": storage}
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "store"}, "spec": claim}]
    metadata = _metadata(parts, group.name)
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def _pod(parts: ObjectInputs) -> Document:
    group = parts.group
    size = group.vm_resources.ephemeral_disk_size if group.vm_resources else 0
    pod: Document = {
        "terminationGracePeriodSeconds": GRACE_S + 10,  # longer than the preStop hook, see ``STATEFUL_SET``
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "initContainers": [_render_container(parts)],
        "containers": [_agent_container(parts)],
        "volumes": [
            {"name": "agent", "configMap": {"name": f"{group.name}-agent"}},
            {"name": "manifest", "secret": {"secretName": f"{group.name}-manifest"}},
            {"name": "release", "emptyDir": {}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "data", "emptyDir": {"sizeLimit": f"{size}Mi"} if size else {}},
        ],
    }
    if len(group.azs or ()) > 1:
        spread = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
        pod["topologySpreadConstraints"] = [{**spread, "labelSelector": {"matchLabels": _pod_selector(parts)}}]
    return pod


def _render_container(parts: ObjectInputs) -> Document:
    """Return the init container, which renders the pod's instance. The image's entrypoint is ``agent-shim render``."""
    paths = [f"/releases/{Path(release).name}" for release in parts.releases]
    patterns = ["--addresses", ADDRESSES, "--group-address", GROUP_ADDRESS]
    fields = {"AGENT_SHIM_INDEX": "metadata.name", "AGENT_SHIM_ADDRESS": "status.podIP"}
    return {
        "name": "render",
        "image": parts.renderer,
        "args": ["/manifest/manifest.yml", *paths, "--group", parts.group.name, *patterns, "--out", "/release"],
        "env": [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()],
        "securityContext": {
            "runAsUser": 0,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            # The renderer needs these capabilities to preserve the owners and modes of package files.
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "volumeMounts": [
            {"name": "manifest", "mountPath": "/manifest", "readOnly": True},
            {"name": "release", "mountPath": "/release"},
            {"name": "scratch", "mountPath": TEMPORARY},
        ],
    }


def _agent_container(parts: ObjectInputs) -> Document:
    confined = {
        "runAsUser": 0,
        "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    mounts: list[Document] = [
        {"name": "agent", "mountPath": "/etc/agent_shim", "readOnly": True},
        {"name": "release", "mountPath": "/release", "readOnly": True},
        {"name": "data", "mountPath": "/var/vcap/data"},
    ]
    if parts.group.persistent_disk:
        mounts.append({"name": "store", "mountPath": "/var/vcap/store"})
    command = ["/opt/agent_shim/bin/agent-shim", "drain", "--timeout", str(GRACE_S)]
    all_ports = [*parts.ports, JobPort("agent", AGENT_PORT)]
    return {
        "name": "instance",
        "image": parts.image,
        "command": ["/opt/agent_shim/launch", "-C", "/etc/agent_shim/agent.json"],
        "securityContext": {"privileged": True, "runAsUser": 0} if parts.is_privileged else confined,
        "ports": [{"name": port.name, "containerPort": port.number, "protocol": port.protocol} for port in all_ports],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "agent"}, "periodSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": command}}},
        "resources": _resources(parts.group),
        "volumeMounts": mounts,
    }


def _resources(group: Group) -> Document:
    """Return the requests and limits for the group's ``vm_resources``, or small requests if it has none."""
    wanted = group.vm_resources
    if wanted is None:
        return {"requests": {"cpu": "50m", "memory": "128Mi"}}
    requests: Document = {}
    limits: Document = {}
    if wanted.cpu:
        requests["cpu"] = f"{round(wanted.cpu * 1000)}m"
    if wanted.ram:
        requests["memory"] = limits["memory"] = f"{wanted.ram}Mi"
    if wanted.ephemeral_disk_size:
        requests["ephemeral-storage"] = f"{wanted.ephemeral_disk_size}Mi"
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _kustomization() -> Document:
    names = ("configmap", "secret", "service", "statefulset", "poddisruptionbudget")
    resources = [f"{name}.yaml" for name in names]
    return {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources}


def _dockerfile(parts: ObjectInputs) -> str:
    copies = "".join(f"COPY {release} /releases/{Path(release).name}\n" for release in parts.releases)
    build = f"# podman build --tag {parts.renderer} --file DIR/Dockerfile .   # run it where `render` was run\n"
    return f"{build}ARG RENDERER=agent-shim-renderer\nFROM ${{RENDERER}}\n{copies}"


class _BlockDumper(yaml.SafeDumper):
    """A YAML dumper that writes multi-line strings as block scalars, and never uses anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - required by PyYAML
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - required by PyYAML
        super().increase_indent(flow, False)  # also indent a list below its key


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Represent a string for ``_BlockDumper``: as a block scalar if it has several lines."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represented)
