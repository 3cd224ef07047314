"""Tests settings: precedence of sources, tolerated errors, and error messages with their location."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core import settings
from agent_shim.core.errors import ConfigError, SettingsError
from agent_shim.core.paths import Paths
from agent_shim.demo.pki import HOUR, Authority

CERT = {"ca": "CA", "certificate": "CERT", "private_key": "KEY"}


def parsed(**members: Any) -> settings.Settings:
    return settings.parse(json.dumps({"agent_id": "a-1", **members}).encode(), origin="the test")


def effective(source: settings.Settings, **update: Any) -> settings.Effective:
    return settings.Effective(source, settings.parse_update(json.dumps(update).encode(), origin="the test"))


def test_stemcell_agent_json_names_the_settings_file() -> None:
    raw = b"""{"Platform": {"Linux": {"UseDefaultTmpDir": true, "BindMountPersistentDisk": true}},
               "Infrastructure": {"Settings": {"Sources": [
                   {"Type": "HTTP", "URI": "http://169.254.169.254"},
                   {"Type": "File", "SettingsPath": "/var/vcap/bosh/x.json"}], "UseRegistry": true}}}"""

    assert settings.parse_config(raw, origin="agent.json").settings_files(Paths()) == [Path("/var/vcap/bosh/x.json")]


def test_member_names_in_agent_json_are_case_insensitive() -> None:
    raw = (
        b'{"infrastructure":{"settings":{"sources":[{"type":"File","settingspath":"/x"}]}},"agentshim":{"HTTP":"off"}}'
    )
    config = settings.parse_config(raw, origin="agent.json")

    assert (config.settings_files(Paths()), config.shim.http) == ([Path("/x")], "off")


@pytest.mark.parametrize(("raw", "port"), [(b"{}", 22), (b'{"AgentShim":{"ssh":{"port":2222}}}', 2222)])
def test_ssh_port_is_configurable(raw: bytes, port: int) -> None:
    assert settings.parse_config(raw, origin="agent.json").shim.ssh.port == port


def test_container_cpi_settings_files_are_read_if_no_source_is_configured() -> None:
    assert settings.parse_config(b"{}", origin="agent.json").settings_files(Paths()) == list(settings.CPI_SETTINGS)


def test_all_container_cpi_settings_files_are_read_if_one_is_configured() -> None:
    """An official stemcell always names the warden CPI's settings file but may be used with another CPI."""
    first, second, third = settings.CPI_SETTINGS
    raw = b'{"Infrastructure":{"Settings":{"Sources":[{"Type":"File","SettingsPath":"%s"}]}}}' % bytes(second)

    assert settings.parse_config(raw, origin="agent.json").settings_files(Paths()) == [second, first, third]


@pytest.mark.parametrize("named", ["/var/vcap/bosh/warden-cpi-agent-env.json", "/var/vcap/bosh/mine.json", None])
def test_agent_with_a_custom_base_directory_does_not_read_settings_outside_it(named: str | None) -> None:
    sources = [{"Type": "File", "SettingsPath": named}] if named else []
    raw = json.dumps({"Infrastructure": {"Settings": {"Sources": sources}}}).encode()
    found = settings.parse_config(raw, origin="agent.json").settings_files(Paths(Path("/tmp/x")))

    assert found
    assert [path for path in found if not path.is_relative_to("/tmp/x/bosh")] == []


def test_error_for_an_invalid_agent_json_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the agent's configuration from agent\.json: .*"):
        settings.parse_config(b"{", origin="agent.json")


@pytest.mark.attack("settings are malformed")
@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "the file is empty"),
        (b"  \n", "the file is empty"),
        (b'{"agent_id": "a', "truncated"),
        (b'{"agent_id": 7}', r"\$\.agent_id"),
        (b"{}", "agent_id"),
        (b'{"agent_id": ""}', r"\$\.agent_id is empty"),
        (b'{"agent_id": "a.b"}', r"\$\.agent_id is not a valid bus subject token"),
        (b'{"agent_id": "a\\u0000b"}', r"\$\.agent_id is not a valid bus subject token"),
        (b'{"agent_id": "a\\u001b[2J"}', r"\$\.agent_id is not a valid bus subject token"),
        (b'{"agent_id": "a\\u0085b"}', r"\$\.agent_id is not a valid bus subject token"),
        (b'{"agent_id": "a\\u202eb"}', r"\$\.agent_id is not a valid bus subject token"),
        (b'{"agent_id": "a", "networks": {"n": {"ip": 1}}}', r"\$\.networks\.n\.ip"),
        (b'{"agent_id": "a", "env": {"bosh": {"mbus": {"cert": {"ca": 5}}}}}', r"\$\.env\.bosh\.mbus\.cert\.ca"),
        (b"\xff", ""),
    ],
)
def test_invalid_settings_are_rejected_with_their_location(raw: bytes, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"settings.*the file.*{problem}"):
        settings.parse(raw, origin="the file")


def test_t4_newest_bus_addresses_are_used() -> None:
    plain = parsed(mbus="nats://old:1")
    env = parsed(mbus="nats://old:1", env={"bosh": {"mbus": {"urls": ["nats://env:2"], "cert": CERT}}})

    assert effective(plain).mbus.urls == ("nats://old:1",)
    assert effective(env).mbus.urls == ("nats://env:2",)
    assert effective(env, mbus={"urls": ["nats://new:3"]}).mbus.urls == ("nats://new:3",)
    assert effective(parsed()).mbus.scheme == ""
    assert effective(env).mbus.scheme == "nats"


def test_t4_stored_credentials_without_a_ca_are_ignored() -> None:
    env = parsed(env={"bosh": {"mbus": {"cert": CERT}}})

    assert effective(env, mbus={"cert": {"ca": "", "certificate": "N", "private_key": "N"}}).mbus.certificate == "CERT"
    assert effective(env, mbus={"cert": {"ca": "C2", "certificate": "N", "private_key": "N"}}).mbus.certificate == "N"


AUTHORITY = Authority()


def credentials_since(seconds: float) -> dict[str, str]:
    """Return credentials with a certificate that became valid ``seconds`` ago."""
    pair = AUTHORITY.agent("a-1", valid=(-seconds, HOUR))
    return {"ca": AUTHORITY.ca, "certificate": pair.certificate, "private_key": pair.private_key}


@pytest.mark.parametrize(("document", "stored", "winner"), [(60, 120, "document"), (120, 60, "stored")])
def test_newer_of_two_bus_certificates_is_used(document: int, stored: int, winner: str) -> None:
    """The certificate in the CPI's Secret may be older or newer than the one that the Director sent in a rotation."""
    certs = {"document": credentials_since(document), "stored": credentials_since(stored)}
    found = effective(parsed(env={"bosh": {"mbus": {"cert": certs["document"]}}}), mbus={"cert": certs["stored"]})

    assert found.mbus.certificate == certs[winner]["certificate"]
    assert found.mbus.private_key == certs[winner]["private_key"]


def test_stored_bus_certificate_wins_over_a_certificate_of_the_same_age() -> None:
    both = credentials_since(60)
    for document, stored in [(both, both | {"ca": "C2"}), (CERT, CERT | {"ca": "C2"}), (CERT, both | {"ca": "C2"})]:
        found = effective(parsed(env={"bosh": {"mbus": {"cert": document}}}), mbus={"cert": stored})
        assert found.mbus.ca == "C2"


def test_all_known_credentials_are_tried_on_the_bus() -> None:
    """The current credentials are tried first. The credentials from the CPI are also tried with the addresses from the
    CPI.
    """
    source = parsed(env={"bosh": {"mbus": {"cert": credentials_since(60), "urls": ["nats://old:1"]}}})
    found = effective(source, mbus={"cert": credentials_since(120), "urls": ["nats://new:2"]})
    known = found.known_mbus

    assert [mbus.urls[0] for mbus in known] == ["nats://new:2", "nats://old:1", "nats://new:2"]
    assert [mbus.certificate for mbus in known[:2]] == [found.mbus.certificate] * 2
    assert known[2].certificate == found.update.mbus.cert.certificate


def test_blobstore_uses_proxies_from_the_settings() -> None:
    env = {"http_proxy": "http://p:1", "no_proxy": "10.0.0.0/8", "https_proxy": None}
    found = effective(parsed(env=env), blobstores=[{"provider": "dav", "options": {"endpoint": "http://b"}}])

    assert found.blobstore == settings.Blobstore(
        "dav", {"endpoint": "http://b"}, {"http_proxy": "http://p:1", "no_proxy": "10.0.0.0/8"}
    )
    assert effective(parsed()).blobstore.proxies == {}


def test_first_blobstore_in_the_newest_settings_is_used() -> None:
    top = parsed(blobstore={"provider": "local", "options": {"blobstore_path": "/b"}})
    env = parsed(
        blobstore={"provider": "local"}, env={"bosh": {"blobstores": [{"provider": "dav"}, {"provider": "s3"}]}}
    )

    assert effective(top).blobstore.options == {"blobstore_path": "/b"}
    assert effective(env).blobstore.provider == "dav"
    assert effective(env, blobstores=[{"provider": "gcs"}]).blobstore.provider == "gcs"


def test_name_servers_come_from_the_default_dns_network() -> None:
    one = parsed(networks={"a": {"dns": ["192.0.2.1"]}})
    two = parsed(networks={"a": {"dns": ["192.0.2.1"]}, "b": {"default": ["gateway", "dns"], "dns": ["192.0.2.2"]}})

    floating = parsed(networks={"a": {"dns": ["192.0.2.1"]}, "v": {"type": "vip", "ip": "198.51.100.1"}})

    assert effective(floating).name_servers == ["192.0.2.1"]
    assert effective(one).name_servers == ["192.0.2.1"]
    assert effective(two).name_servers == ["192.0.2.2"]
    assert effective(parsed()).name_servers == []


def test_empty_time_server_list_replaces_an_older_list() -> None:
    assert effective(parsed(ntp=["a"])).ntp == ["a"]
    assert effective(parsed(ntp=["a"], env={"bosh": {"ntp": []}})).ntp == []


def test_update_settings_always_replaces_trusted_certs_and_disk_associations() -> None:
    stored = settings.parse_update(
        json.dumps(
            {
                "trusted_certs": "old",
                "disk_associations": [{"name": "d", "cid": "c"}],
                "mbus": {"cert": CERT, "urls": ["nats://a:1"]},
                "blobstores": [{"provider": "dav"}],
            }
        ).encode(),
        origin="t",
    )

    merged = stored.merged(settings.UpdateSettings())
    assert (merged.trusted_certs, merged.disk_associations) == ("", [])
    assert (merged.mbus, merged.blobstores) == (stored.mbus, stored.blobstores)

    news = settings.UpdateSettings(mbus=settings.MbusSettings(cert=settings.Cert("c", "d", "e")), blobstores=[])
    merged = stored.merged(news)
    assert merged.mbus.urls == []
    assert merged.blobstores == []


@pytest.mark.parametrize(
    ("members", "dynamic"),
    [
        ({"type": "manual", "ip": "10.0.0.1", "netmask": "255.0.0.0"}, False),
        ({"type": "manual", "ip": "10.0.0.1"}, True),
        ({"type": "dynamic", "ip": "10.0.0.1", "netmask": "255.0.0.0"}, True),
        ({"type": "manual", "ip": "10.0.0.1", "netmask": "255.0.0.0", "use_dhcp": True}, True),
        ({"type": "vip", "ip": "10.0.0.1"}, False),
    ],
)
def test_network_is_dynamic_unless_it_has_a_static_address(members: dict[str, Any], dynamic: bool) -> None:
    assert parsed(networks={"n": members}).networks["n"].is_dynamic is dynamic


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("20m", "20m"),
        ("1G", "1G"),
        ("50%", "50%"),
        ("4096", "4096"),
        ("", "16m"),
        ("1m,mode=777", "16m"),
        ("-1", "16m"),
    ],
)
def test_invalid_tmpfs_size_is_replaced_with_the_default(given: str, size: str) -> None:
    """The size becomes part of the mount options, so an invalid size could add another option."""
    assert settings.TmpfsDir(tmpfs=True, tmpfs_size=given).size("16m") == size


@pytest.mark.parametrize(
    ("mbus", "is_good"),
    [
        ("nats://10.0.0.1:4222", True),
        ("https://mbus:secret@0.0.0.0:6868", True),
        ("https://mbus:secret@:6868", True),
        ("nats://:4222", False),
        ("nats//foo", False),
        ("nats://host:70000", False),
        ("ftp://host", False),
        ("", False),
    ],
)
def test_invalid_bus_address_is_rejected(mbus: str, is_good: bool) -> None:
    """An HTTPS address need not contain a host, because the agent itself listens there, possibly on all addresses."""
    found = settings.Effective(parsed(mbus=mbus), settings.UpdateSettings())

    with contextlib.nullcontext() if is_good else pytest.raises(SettingsError, match=r"\$\.mbus"):
        settings.require_bus(found, "the file")


def test_settings_error_lists_only_the_first_few_invalid_members() -> None:
    networks = {f"n{number}": {"ip": 7} for number in range(5000)}
    with pytest.raises(SettingsError) as caught:
        settings.parse(json.dumps({"agent_id": "a", "networks": networks}).encode(), origin="x")

    assert str(caught.value).count("Expected") == settings.MAX_MISTAKES
