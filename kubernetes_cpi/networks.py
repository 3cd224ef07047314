"""Convert a VM's networks to the agent's network settings, to the pod's annotations and DNS configuration, and to
Services for `vip` networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kubernetes_cpi import names, schema
from kubernetes_cpi.client import SERVICES, Object
from kubernetes_cpi.config import Networks
from kubernetes_cpi.errors import InputError, NotSupportedError
from kubernetes_cpi.properties import NetworkProperties, Port

MAX_NAMESERVERS: Final = 3
"""Maximum number of DNS servers in a pod's dnsConfig."""
MULTUS: Final = "k8s.v1.cni.cncf.io/networks"
DELEGATED: Final = "((delegated_prefix))"
ADDRESS_OF_FORMER_VM: Final = ("ip", "netmask", "gateway")
"""Members to ignore in a dynamic network, because the Director fills them with values from the instance's previous VM
(network_settings.rb).
"""


class RequestedNetwork(msgspec.Struct, frozen=True):
    """A network in a create_vm request. Unknown members are passed on to the agent."""

    type: str = "manual"
    ip: str = ""
    netmask: str = ""
    prefix: str = ""
    """Length of the prefix that is delegated to the VM, or 32 or 128 for a single address. It is unrelated to the
    prefix length that follows from ``netmask``.
    """
    nic_group: str = ""
    """Networks with the same group share a network interface."""
    gateway: str = ""
    dns: list[str] = []
    default: list[str] = []
    cloud_properties: dict[str, Any] | None = None


class Vip(msgspec.Struct, frozen=True):
    """A `vip` network: a fixed address whose traffic is forwarded to one VM."""

    ip: str
    ports: list[Port]
    type: str
    """The Service's type, such as `LoadBalancer`."""

    @property
    def name(self) -> str:
        """Name of the Service. VMs that use the address one after another share this name."""
        return "vip-" + self.ip.replace(".", "-").replace(":", "-")


class NetworkPlan(msgspec.Struct, frozen=True):
    """The settings that result from a VM's networks, for the agent, the pod and the Services."""

    settings: dict[str, Any]
    """`networks` in the agent's settings."""
    annotations: dict[str, str] = {}
    nameservers: list[str] = []
    address: str = ""
    """Address that the pod must get, or "" if any address will do."""
    vips: list[Vip] = []


def plan(networks: Mapping[str, Any], defaults: Networks) -> NetworkPlan:
    """Read the networks in a request and derive the pod's annotations, DNS settings and Services."""
    plan = NetworkPlan(settings={})
    annotations: dict[str, str] = {}
    interfaces: list[Object] = []
    primary, address = "", ""
    nameservers: list[str] = []
    groups: dict[str, str] = {}
    for name, given in networks.items():
        network, properties = _read(name, given)
        if network.nic_group and (other := groups.setdefault(network.nic_group, name)) != name:
            raise NotSupportedError(
                f"cannot put the networks {other!r} and {name!r} on one interface (nic_group {network.nic_group}): the "
                "Director can assign only one address to an interface of a pod; leave out one of the networks or its "
                "nic_group"
            )
        plan.settings[name] = _settings(given, network)
        if network.type == "vip":
            _refuse_prefix(name, network)
            plan.vips.append(_vip(name, network, properties))
            continue
        # Use the DNS servers of the default network for DNS, or else those of the first network that has any.
        if network.dns and (not nameservers or "dns" in network.default):
            nameservers = network.dns[:MAX_NAMESERVERS]
        if properties.cni == "multus":
            interfaces.append(_interface(name, network, properties))
            continue
        if primary:
            raise NotSupportedError(
                f"cannot put a VM on the networks {primary!r} and {name!r}: a pod has one interface; give one of them "
                "the cloud property `cni: multus`"
            )
        primary = name
        if network.type == "manual":
            address = network.ip
            annotations |= _address_annotations(name, network, properties, defaults)
        else:
            annotations |= properties.annotations
    if interfaces:
        annotations[MULTUS] = msgspec.json.encode(interfaces).decode()
    return NetworkPlan(plan.settings, annotations, nameservers, address, plan.vips)


def service(vip: Vip, vm: str, director: str) -> Object:
    """Return the Service for a VM's `vip` network."""
    spec: Object = {"type": vip.type, "selector": {names.VM: vm, names.KIND: names.KIND_VM}, "ports": ports(vip.ports)}
    spec |= {"loadBalancerIP": vip.ip} if vip.type == "LoadBalancer" else {"clusterIP": vip.ip}
    labels = names.labels(names.KIND_VIP, director, **{names.VM: vm})
    return SERVICES.document(vip.name, labels, spec)


def ports(given: list[Port]) -> list[Object]:
    """Convert ports from the cloud properties to ports of a Service."""
    return [
        {
            "name": port.name or f"{port.protocol.lower()}-{port.port}",
            "port": port.port,
            "targetPort": port.target_port or port.port,
            "protocol": port.protocol,
            **({"nodePort": port.node_port} if port.node_port else {}),
        }
        for port in given
    ]


def _read(name: str, given: object) -> tuple[RequestedNetwork, NetworkProperties]:
    """Validate one of the request's networks and its cloud properties."""
    try:
        network = msgspec.convert(given, RequestedNetwork)
    except msgspec.ValidationError as exc:
        raise InputError(f"cannot use the network {name!r}: {exc}") from None
    if network.type not in ("manual", "dynamic", "vip"):
        raise NotSupportedError(f"cannot use the network {name!r}: its type {network.type!r} is not known")
    origin = f"the cloud properties of the network {name!r}"
    return network, schema.read(network.cloud_properties or {}, NetworkProperties, origin=origin)


def _settings(given: Mapping[str, Any], network: RequestedNetwork) -> dict[str, Any]:
    """Return the network in the form that the agent expects. The agent has nothing to configure, because the pod's
    interfaces already exist.
    """
    dropped = ADDRESS_OF_FORMER_VM if network.type == "dynamic" else ()
    return {**{key: value for key, value in given.items() if key not in dropped}, "preconfigured": True}


def _vip(name: str, network: RequestedNetwork, properties: NetworkProperties) -> Vip:
    if not network.ip or not properties.ports:
        raise InputError(
            f"cannot use the vip network {name!r}: it needs an address, and `ports` in its cloud properties"
        )
    return Vip(network.ip, properties.ports, properties.service_type)


def _address_annotations(
    name: str, network: RequestedNetwork, properties: NetworkProperties, defaults: Networks
) -> dict[str, str]:
    """Return the annotations that make the CNI give the pod the network's address.

    Only an annotation that contains ``DELEGATED`` can give the pod a whole prefix. Without one, a delegated prefix is
    rejected.

    Raises ``NotSupportedError`` if no CNI that can do this is configured.
    """
    cni = properties.cni or defaults.cni
    filled = {"((ip))": network.ip, "((gateway))": network.gateway, "((prefix))": str(_prefix(network))}
    given = {**defaults.annotations, **properties.annotations}
    if cni == "template" and any(DELEGATED in text for text in given.values()):
        filled[DELEGATED] = network.prefix or str(_single_address_prefix(network))
    else:
        _refuse_prefix(name, network)
    annotations = {}
    for key, text in given.items():
        annotations[key] = text
        for mark, value in filled.items():
            annotations[key] = annotations[key].replace(mark, value)
    match cni:
        case "calico":
            annotations["cni.projectcalico.org/ipAddrs"] = f'["{network.ip}"]'
        case "kube-ovn":
            annotations["ovn.kubernetes.io/ip_address"] = network.ip
            annotations |= {"ovn.kubernetes.io/logical_switch": properties.name} if properties.name else {}
        case "antrea":
            annotations["ipam.antrea.io/pod-ips"] = network.ip
            annotations |= {"ipam.antrea.io/ippools": properties.name} if properties.name else {}
        case "template" if annotations:
            pass
        case _:
            raise NotSupportedError(
                f"cannot give a pod the address {network.ip} of the manual network {name!r}: set `cni` in its "
                "cloud properties (calico, kube-ovn, antrea, or template with `annotations`), or make the network "
                "dynamic"
            )
    return annotations


def _interface(name: str, network: RequestedNetwork, properties: NetworkProperties) -> Object:
    """Return the entry for an additional interface in multus's annotation."""
    if not properties.name:
        raise InputError(f"cannot use the network {name!r}: `cni: multus` needs `name`, a NetworkAttachmentDefinition")
    namespace, _, definition = properties.name.rpartition("/")
    interface: Object = {"name": definition}
    if namespace:
        interface["namespace"] = namespace
    if network.type == "manual":
        _refuse_prefix(name, network)
        interface["ips"] = [f"{network.ip}/{_prefix(network)}"]
    if properties.interface:
        interface["interface"] = properties.interface
    return interface


def _refuse_prefix(name: str, network: RequestedNetwork) -> None:
    """Reject a delegated prefix on a network that gives a pod only one address. The jobs would otherwise try to use all
    addresses in the prefix.
    """
    if network.prefix and network.prefix != str(_single_address_prefix(network)):
        raise NotSupportedError(
            f"cannot delegate the prefix {network.ip}/{network.prefix} of the network {name!r} to a VM: this kind of "
            f"network gives a pod one address; take `prefix` out of the subnet, or use `cni: template` and {DELEGATED} "
            "in an annotation of a network plugin that routes prefixes to pods"
        )


def _single_address_prefix(network: RequestedNetwork) -> int:
    """Return the prefix length that means a single address: 32 or 128."""
    return 128 if ":" in network.ip else 32


def _prefix(network: RequestedNetwork) -> int:
    """Return the network's prefix length, computed from its netmask.

    The request's `prefix` cannot be used, because it is the length of a delegated prefix.
    """
    import ipaddress

    try:
        return int(ipaddress.ip_address(network.netmask)).bit_count()
    except ValueError:  # The netmask is missing or invalid.
        return _single_address_prefix(network)
