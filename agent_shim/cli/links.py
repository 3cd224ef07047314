"""Resolves the links between the jobs in a manifest, as the Director does.

The rules match ``bosh/director/links`` in bosh. The provider must have the link's type. If ``consumes`` in the
manifest mentions the link, the provider must also have the name given there (``from``, by default the link's own name).
It is an error if there is more than one possible provider. In ``consumes``, the value ``nil`` blocks a link, and
``instances``, ``properties`` and ``address`` define the link's content directly. An optional link may be absent unless
``consumes`` mentions it. Links to other deployments cannot be resolved here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agent_shim.cli.deployment import BPM, Consumed, DeployedJob, DeploymentManifest, Group, JobSpec
from agent_shim.core.errors import ConfigError

NIL: Final = "nil"
"""A link is blocked if its value in the manifest is this string instead of a mapping."""
MANUAL: Final = ("instances", "properties", "address")
DOMAIN: Final = "bosh"

Address = Callable[[Group, int, str, bool], str | None]
"""A function that returns the address of an instance, or None if it is unknown. Its arguments are the group, the index,
the network, and whether the address must be an IP address rather than a name.
"""


class Addresses(NamedTuple):
    """Functions that return the addresses of instances, and of a whole group (``link.address``). ``whole`` takes
    the group and the network, and returns "" if groups have no address.
    """

    one: Address
    whole: Callable[[Group, str], str]


class LinkProvider(NamedTuple):
    """A link that a job provides, or a disk. ``job`` is "" for a disk."""

    group: Group
    job: str
    name: str
    """The name that ``from`` in ``consumes`` refers to: the alias from ``as`` in ``provides``, or the original name."""
    type: str
    properties: Mapping[str, Any]

    def __str__(self) -> str:
        """Return ``NAME (type TYPE) of GROUP/JOB``, for example ``nats (type nats) of nats/nats-tls``."""
        return f"{self.name} (type {self.type}) of {self.group.name}" + (f"/{self.job}" if self.job else "")


class Links(NamedTuple):
    """A job's links by name, and the reasons why links are absent."""

    found: dict[str, dict[str, Any]]
    absent: dict[str, str]


class Resolver:
    """Resolves links between all jobs in a manifest. ``specs`` contains the job specs that are available, by group and
    job. Methods collect errors in ``_errors``, and the constructor and ``resolve`` raise them together.
    """

    def __init__(
        self, manifest: DeploymentManifest, specs: Mapping[tuple[str, str], JobSpec], addresses: Addresses
    ) -> None:
        self._manifest, self._specs, self._addresses = manifest, specs, addresses
        self._errors: list[str] = []
        self.warnings: list[str] = []
        """Entries of ``consumes`` and ``provides`` without effect, which the caller prints."""
        self._unknown = [
            f"{group.name}/{job.name}"
            for group in manifest.instance_groups
            for job in group.jobs
            if (group.name, job.name) not in specs and job.name != BPM
        ]
        """Jobs without a spec, which may provide any link."""
        self.providers = [provider for group in manifest.instance_groups for provider in self._providers(group)]
        self._raise_errors()

    def resolve(self, group: Group, job: DeployedJob) -> Links:
        """Return a job's links. Raises ``ConfigError`` with a line for each link that cannot be resolved."""
        links = Links({}, {})
        given = dict(job.consumes or {})
        for wanted in self._specs[group.name, job.name].consumes or ():
            is_explicit = wanted.name in given
            source = given.pop(wanted.name, {})
            where = f"the link {wanted.name} of {group.name}/{job.name}"
            mistakes = list(_mistakes(source))
            self._errors += [f"cannot resolve {where}: {mistake}" for mistake in mistakes]
            if mistakes:
                continue
            if source == NIL and wanted.optional:
                links.absent[wanted.name] = f"`consumes` of {job.name} blocks it with nil"
            elif source == NIL:
                self._errors.append(f"cannot resolve {where}: it is not optional, but `consumes` blocks it with nil")
            elif any(key in source for key in MANUAL):
                links.found[wanted.name] = self._manual(source, where)
            elif is_explicit or not self._is_absent(wanted):
                self._add(links, wanted, source if is_explicit else None, where)
            else:
                why = f"it is optional, and no job of the manifest provides the type {wanted.type}"
                links.absent[wanted.name] = f"{why}; {_advice(wanted)}"
        self.warnings += [
            f"{job.name} consumes no link {name}: this entry of `consumes` has no effect" for name in given
        ]
        self._raise_errors()
        return links

    def providers_of(self, group: Group, job: DeployedJob) -> list[LinkProvider]:
        """Return the links that a job provides."""
        owner = (group.name, job.name)
        return [provider for provider in self.providers if (provider.group.name, provider.job) == owner]

    def _is_absent(self, wanted: Consumed) -> bool:
        """Return True if an optional link has no provider and every release that could contain one is known."""
        return (
            wanted.optional and not self._unknown and all(provider.type != wanted.type for provider in self.providers)
        )

    def _add(self, links: Links, wanted: Consumed, source: Mapping[str, Any] | None, where: str) -> None:
        """Find the job in the manifest that provides a link, and add the link to ``links``. ``source`` is the link's
        entry in ``consumes``, or None if there is no entry.
        """
        of_type = [provider for provider in self.providers if provider.type == wanted.type]
        if source is None:
            source, found = {}, of_type
        else:
            if source.get("deployment") not in (None, self._manifest.name):
                why = f"only a Director knows the deployment {source['deployment']}"
                self._errors.append(f"cannot resolve {where}: {why}; {_advice(wanted)}")
                return
            # In old manifests, ``from`` may be a path such as DEPLOYMENT.GROUP.JOB.LINK.
            name = str(source.get("from", wanted.name)).rpartition(".")[2]
            found = [provider for provider in of_type if provider.name == name]
        network = source.get("network")
        if len(found) != 1:
            self._errors.append(f"cannot resolve {where}: {self._failure(wanted, source, of_type, found)}")
        # A disk, which has no job, does not belong to any network.
        elif network and network not in ([] if not found[0].job else found[0].group.network_names):
            self._errors.append(f"cannot resolve {where}: {found[0]} does not belong to the network {network}")
        else:
            links.found[wanted.name] = self._content(found[0], network, bool(source.get("ip_addresses")))

    def _failure(
        self,
        wanted: Consumed,
        source: Mapping[str, Any],
        of_type: Sequence[LinkProvider],
        found: Sequence[LinkProvider],
    ) -> str:
        """Return why a link cannot be resolved. ``of_type`` contains all providers of the right type. ``found``
        contains those that also have the right name: either none or more than one.
        """
        if found:
            several = ", ".join(map(str, found))
            choose = f"`consumes: {{{wanted.name}: {{from: NAME}}}}` chooses one"
            return f"it has several providers: {several}; {choose}, and `provides: {{LINK: {{as: NAME}}}}` names them"
        named = f" under the name {source['from']}" if "from" in source else ""
        why = f"no job provides the type {wanted.type}{named}"
        if of_type:
            return f"{why}; `from` may name one of: {', '.join(map(str, of_type))}"
        if self._unknown:
            unknown = f"the releases of {', '.join(self._unknown)} are not given, and one of these jobs may provide it"
            block = f", or block it: `consumes: {{{wanted.name}: nil}}`" if wanted.optional else ""
            return f"{why}, but {unknown}; give their releases, too{block}"
        return f"{why}; {_advice(wanted)}"

    def _content(self, provider: LinkProvider, network: str | None, must_be_ip: bool) -> dict[str, Any]:
        """Return the content of a link, as a Director gives it to templates, with ``whole`` and ``provider`` added for
        ``render.rb``. If ``must_be_ip`` is set, the addresses of instances are IP addresses instead of names.
        """
        if not provider.job:  # the link is a disk
            about = {"deployment_name": self._manifest.name, "properties": provider.properties}
            return {**about, "provider": str(provider), "networks": [], "instances": []}
        group = provider.group
        chosen = network or group.default_network
        return {
            "deployment_name": self._manifest.name,
            "domain": DOMAIN,
            "default_network": chosen,
            "networks": group.network_names,
            "instance_group": group.name,
            "group_name": f"{provider.name}-{provider.type}",
            "use_link_dns_names": False,
            "use_short_dns_addresses": False,
            "properties": provider.properties,
            "provider": f"{group.name}/{provider.job}",
            "whole": self._addresses.whole(group, chosen) or None,
            "instances": [
                {
                    "name": group.name,
                    "id": f"{group.name}-{index}",
                    "index": index,
                    "bootstrap": index == 0,
                    "az": group.az(index),
                    "address": self._addresses.one(group, index, chosen, must_be_ip),
                }
                for index in range(group.count)
            ],
        }

    def _manual(self, source: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the content of a link that the manifest defines directly. ``source`` is the link's entry in
        ``consumes``. If ``source`` has no list of ``instances``, add an error.
        """
        if not isinstance(source.get("instances"), list):
            self._errors.append(f"cannot resolve {where}: `consumes` has no `instances: [{{address: …}}]` for it")
        return {**{key: source.get(key) for key in MANUAL}, "deployment_name": self._manifest.name, "is_manual": True}

    def _providers(self, group: Group) -> Iterator[LinkProvider]:
        """Yield the links that a group's jobs and disks provide."""
        for job in group.jobs:
            if spec := self._specs.get((group.name, job.name)):
                yield from self._provided(group, job, spec)
        for disk in group.persistent_disks or ():
            yield LinkProvider(group, "", disk.name, "disk", {"name": disk.name})

    def _provided(self, group: Group, job: DeployedJob, spec: JobSpec) -> Iterator[LinkProvider]:
        """Yield the links that a job provides according to its spec or to the manifest."""
        given = dict(job.provides or {})
        where = f"{group.name}/{job.name}"
        released = [(link.name, link.type, link.properties) for link in spec.provides or ()]
        custom = [
            (definition.get("name"), definition.get("type"), definition.get("properties"))
            for definition in job.custom_provider_definitions or ()
        ]
        provided = [*custom, *released]
        names = [name for name, *_ in provided]
        for name, kind, paths in provided:
            if not (isinstance(name, str) and name and isinstance(kind, str) and kind):
                self._errors.append(f"cannot read custom_provider_definitions of {where}: each needs a name and a type")
                continue
            if names.count(name) > 1:
                self._errors.append(f"cannot read custom_provider_definitions of {where}: {name} is provided twice")
                continue
            source = given.pop(name, {})
            if source == NIL:
                continue
            if not isinstance(source, dict) or "name" in source or "type" in source:
                what = "`as`, `shared` and `aliases`, or the string nil"
                self._errors.append(f"cannot read `provides` of {where}: {name} must be a mapping with {what}")
                continue
            properties = self._mapped(group, job, spec, name, paths or ())
            yield LinkProvider(group, job.name, str(source.get("as", name)), kind, properties)
        self.warnings += [
            f"{job.name} provides no link {name}: this entry of `provides` has no effect" for name in given
        ]

    def _mapped(self, group: Group, job: DeployedJob, spec: JobSpec, link: str, paths: Sequence[str]) -> dict[str, Any]:
        """Return the properties of a link: values from the manifest, otherwise defaults, otherwise null."""
        mapped: dict[str, Any] = {}
        for path in paths:
            value: Any = self._manifest.properties_of(group, job)
            keys = path.split(".")
            for key in keys:
                if not isinstance(value, dict) or key not in value:
                    if path not in (spec.properties or {}):
                        why = f"its property {path} is not in the spec of the job"
                        self._errors.append(f"cannot provide the link {link} of {group.name}/{job.name}: {why}")
                    value = spec.default(path)
                    break
                value = value[key]
            parent = mapped
            for key in keys[:-1]:
                parent = parent.setdefault(key, {})
            parent[keys[-1]] = value
        return mapped

    def _raise_errors(self) -> None:
        if self._errors:
            raise ConfigError("\n".join(self._errors))


def _mistakes(source: Any) -> Iterator[str]:
    """Yield the errors that would make the Director reject a value of ``consumes``."""
    if source == NIL:
        return
    if not isinstance(source, dict):
        yield "its value in `consumes` is neither a mapping nor the string nil"
        return
    for key in ("instances", "properties"):
        if key in source and "from" in source:
            yield f"`consumes` has both `{key}` and `from`"
    if "properties" in source and "instances" not in source:
        yield "`consumes` has `properties` without `instances`"
    if not isinstance(source.get("ip_addresses", True), bool):
        yield "`ip_addresses` in `consumes` is neither true nor false"
    if "name" in source or "type" in source:
        yield "`consumes` has `name` or `type`, which only a release may define"


def _advice(wanted: Consumed) -> str:
    values = "{instances: [{address: …}], properties: {…}}"
    return f"add a job that provides it, or give the job its values: `consumes: {{{wanted.name}: {values}}}`"
