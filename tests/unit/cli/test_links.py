"""Tests that the links between a manifest's jobs are resolved according to the rules in ``bosh/director/links``."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml

from agent_shim.cli import links
from agent_shim.cli.deployment import DeploymentManifest, JobSpec
from agent_shim.core.errors import ConfigError

MANIFEST = """
name: shop
instance_groups:
- name: db
  instances: 2
  azs: [z1, z2]
  networks:
  - name: private
    static_ips: [10.0.0.4-10.0.0.5]
    default: [gateway]
  - name: public
    static_ips: [192.0.2.4, 192.0.2.5]
  persistent_disks: [{name: records, type: small}]
  jobs:
  - {name: postgres, release: r, properties: {port: 5433}}
- name: front
  jobs:
  - {name: web, release: r}
"""
SPECS = """
db/postgres:
  properties: {port: {default: 5432}, user: {default: vcap}, socket: {}}
  provides: [{name: db, type: sql, properties: [port, user, socket]}]
front/web:
  consumes: [{name: db, type: sql}]
"""


def resolved(
    consumes: object = None, *, spec: object = None, db: object = None, release: object = None, **job: object
) -> links.Links:
    """Return the links of ``front/web``.

    The arguments change this job, its spec, or the job and spec of ``db/postgres``.
    """
    manifest, specs = yaml.safe_load(MANIFEST), yaml.safe_load(SPECS)
    provider, consumer = manifest["instance_groups"][0]["jobs"][0], manifest["instance_groups"][1]["jobs"][0]
    consumer.update(job, **({} if consumes is None else {"consumes": consumes}))
    provider.update(db or {})
    specs["front/web"]["consumes"] = spec or specs["front/web"]["consumes"]
    specs["db/postgres"].update(release or {})
    if release == {}:
        del specs["db/postgres"]
    return resolver(manifest, specs).resolve(*_consumer(manifest))


def _consumer(manifest: Any) -> Any:
    group = msgspec.convert(manifest, DeploymentManifest).instance_groups[1]
    return group, group.jobs[0]


def resolver(manifest: Any, specs: Any) -> links.Resolver:
    read = {(key.split("/")[0], key.split("/")[1]): msgspec.convert(spec, JobSpec) for key, spec in specs.items()}
    addresses = links.Addresses(lambda group, index, network, _: group.static_ip(index, network), lambda *_: "")
    return links.Resolver(msgspec.convert(manifest, DeploymentManifest), read, addresses)


def test_implicit_link_has_the_same_content_as_from_a_director() -> None:
    assert resolved().found["db"] == {
        "deployment_name": "shop",
        "domain": "bosh",
        "default_network": "private",
        "networks": ["private", "public"],
        "instance_group": "db",
        "group_name": "db-sql",
        "use_link_dns_names": False,
        "use_short_dns_addresses": False,
        "properties": {"port": 5433, "user": "vcap", "socket": None},
        "provider": "db/postgres",
        "whole": None,
        "instances": [
            {"name": "db", "id": "db-0", "index": 0, "bootstrap": True, "az": "z1", "address": "10.0.0.4"},
            {"name": "db", "id": "db-1", "index": 1, "bootstrap": False, "az": "z2", "address": "10.0.0.5"},
        ],
    }


def test_link_addresses_come_from_the_named_network() -> None:
    link = resolved({"db": {"network": "public"}}).found["db"]

    assert link["default_network"] == "public"
    assert [one["address"] for one in link["instances"]] == ["192.0.2.4", "192.0.2.5"]


def test_link_provider_is_found_by_its_alias() -> None:
    assert (
        resolved({"db": {"from": "main"}}, db={"provides": {"db": {"as": "main"}}}).found["db"]["group_name"]
        == "main-sql"
    )


def test_manual_link_in_a_manifest_replaces_a_provider() -> None:
    link = resolved({"db": {"instances": [{"address": "10.9.9.9"}], "properties": {"port": 1}}}).found["db"]

    assert (link["instances"], link["properties"], link["address"]) == ([{"address": "10.9.9.9"}], {"port": 1}, None)


def test_disk_link_is_named_after_the_disk() -> None:
    spec = [{"name": "records", "type": "disk"}]

    assert resolved(spec=spec).found["records"]["properties"] == {"name": "records"}


def test_custom_provider_definition_in_a_manifest_provides_a_link() -> None:
    custom = [{"name": "more", "type": "other", "properties": ["port"]}]
    link = resolved(spec=[{"name": "x", "type": "other"}], db={"custom_provider_definitions": custom}).found["x"]

    assert link["properties"] == {"port": 5433}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"consumes": {"db": "nil"}}, "`consumes` of web blocks it with nil"),
        (
            {"db": {"provides": {"db": "nil"}}},
            "it is optional, and no job of the manifest provides the type sql; add a job",
        ),
        (
            {"release": {"provides": None}},
            "it is optional, and no job of the manifest provides the type sql; add a job",
        ),
    ],
)
def test_optional_link_may_be_absent(change: Any, reason: str) -> None:
    links = resolved(spec=[{"name": "db", "type": "sql", "optional": True}], **change)

    assert links.found == {}
    assert links.absent["db"].startswith(reason)


@pytest.mark.parametrize("is_optional", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"release": {"provides": [{"name": name, "type": "sql"} for name in ("a", "b")]}},
            "it has several providers: a (type sql) of db/postgres, b (type sql) of db/postgres; `consumes: {db: {from",
        ),
        ({"consumes": {"db": {"from": "x"}}}, "under the name x; `from` may name one of: db (type sql) of db/postgres"),
        ({"consumes": {"db": {}}, "db": {"provides": {"db": {"as": "x"}}}}, "`from` may name one of: x (type sql)"),
        ({"consumes": {"db": {"from": "db", "network": "x"}}}, "does not belong to the network x"),
        (
            {"consumes": {"db": {"from": "db", "deployment": "other"}}},
            "only a Director knows the deployment other; add",
        ),
        ({"consumes": {"db": {"from": "db", "instances": []}}}, "`consumes` has both `instances` and `from`"),
        ({"consumes": {"db": {"properties": {}}}}, "`consumes` has `properties` without `instances`"),
        ({"consumes": {"db": {"address": "a"}}}, "`consumes` has no `instances: [{address: …}]` for it"),
        ({"consumes": {"db": None}}, "its value in `consumes` is neither a mapping nor the string nil"),
        ({"consumes": {"db": {"ip_addresses": "yes"}}}, "`ip_addresses` in `consumes` is neither true nor false"),
        ({"release": {}}, "the releases of db/postgres are not given, and one of these jobs may provide it"),
    ],
)
def test_error_for_an_unresolved_link_names_the_job_the_link_and_the_remedy(
    change: Any, said: str, is_optional: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(spec=[{"name": "db", "type": "sql", "optional": is_optional}], **change)

    assert str(caught.value).startswith("cannot resolve the link db of front/web: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"consumes": {"db": "nil"}}, "it is not optional, but `consumes` blocks it with nil"),
        (
            {"release": {"provides": None}},
            "no job provides the type sql; add a job that provides it, or give the job its values",
        ),
    ],
)
def test_missing_required_link_is_an_error(change: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**change)

    assert said in str(caught.value)


def test_link_property_must_be_in_the_job_spec() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(release={"provides": [{"name": "db", "type": "sql", "properties": ["a.b"]}]})

    said = "cannot provide the link db of db/postgres: its property a.b is not in the spec of the job"
    assert str(caught.value) == said


def test_unknown_links_in_a_manifest_cause_a_warning() -> None:
    manifest, specs = yaml.safe_load(MANIFEST), yaml.safe_load(SPECS)
    manifest["instance_groups"][0]["jobs"][0]["provides"] = {"d": {"as": "x"}}
    manifest["instance_groups"][1]["jobs"][0]["consumes"] = {"b": {}}
    found = resolver(manifest, specs)
    found.resolve(*_consumer(manifest))

    assert found.warnings == [
        "postgres provides no link d: this entry of `provides` has no effect",
        "web consumes no link b: this entry of `consumes` has no effect",
    ]
