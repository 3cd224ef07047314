"""Tests how CA bundles are split, and when CAs are installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.pki import Authority
from agent_shim.services import trusted_cas
from agent_shim.services.trusted_cas import TrustedCas, split

A, B = (Authority(name).ca.strip() for name in "ab")
NONE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"


@pytest.mark.attack("a request contains certificates or keys that the agent cannot use")
@pytest.mark.parametrize(
    ("bundle", "found"),
    [
        ("", []),
        ("nothing of the kind", []),
        (A, [A]),
        (f"{A}\n{B}\n", [A, B]),
        (f"{A}{B}", [A, B]),
        (f"# the first\n{A}\n\n# the second\n{B}\nthe end", [A, B]),
        (f"{A}\n-----BEGIN CERTIFICATE-----\ncut off", [A]),
        (f"cut off\n-----END CERTIFICATE-----\n{A}", [A]),
        (f"{A}\r\n{B}\r\n", [A, B]),
        (f"{A}\n{NONE}\n{B}\n", [A, B]),
        (f"-----BEGIN CERTIFICATE-----\ncut off\n{A}\n{B}", [A, B]),
        (NONE.replace("AAAA", "ä\0\x1b"), []),
        (f"{A[:-60]}{A[-30:]}", []),
    ],
)
def test_ca_bundle_is_split_into_certificates(bundle: str, found: list[str]) -> None:
    assert split(bundle) == [f"{pem}\n" for pem in found]


async def test_cas_are_not_installed_with_a_base_directory_other_than_var_vcap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusted_cas, "DIRECTORY", tmp_path / "certificates")
    monkeypatch.setattr("os.geteuid", lambda: 0)

    assert await TrustedCas(Paths(tmp_path)).install(A) == "needs root and the base directory /var/vcap"
    assert not (tmp_path / "certificates").exists()


async def test_ordinary_user_installs_no_cas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent without root skips the installation instead of failing, because jobs bring their own CAs."""
    monkeypatch.setattr(trusted_cas, "DIRECTORY", tmp_path / "certificates")
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    assert await TrustedCas(Paths()).install(A) == "needs root and the base directory /var/vcap"
    assert not (tmp_path / "certificates").exists()


class Image:
    """An image's CA files, and a stand-in for ``update-ca-certificates``.

    The stand-in writes a file with all CAs, and a symlink for each CA.
    """

    def __init__(self, base: Path) -> None:
        self.directory, self.certs, self.runs = base / "local", base / "certs", 0
        self.trusted = self.certs / "ca-certificates.crt"
        for directory in (self.directory, self.certs):
            directory.mkdir()
        self.trusted.write_text("of the image\n")
        os.utime(self.trusted, (1, 1))  # Make the file older than the directories.

    async def run(self, *_: object, **__: object) -> str:
        self.runs += 1
        for link in self.certs.glob("*.pem"):
            link.unlink()
        found = sorted(self.directory.glob("*.crt"))
        for path in found:
            (self.certs / f"{path.stem}.pem").symlink_to(path)
        self.trusted.write_text("of the image\n" + "".join(path.read_text() for path in found))
        return ""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    made = Image(tmp_path)
    monkeypatch.setattr(trusted_cas, "DIRECTORY", made.directory)
    monkeypatch.setattr(trusted_cas, "TRUSTED", made.trusted)
    monkeypatch.setattr(trusted_cas, "PENDING", made.directory / "pending")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("agent_shim.host.command.run", made.run)
    return made


async def test_ca_update_command_runs_only_after_a_change(image: Image) -> None:
    """The command takes three quarters of the start time.

    Timestamps do not show whether it is needed, because in an image the directory is newer than the files that the
    command derives from it.
    """
    trusting = TrustedCas(Paths())
    await trusting.install("")
    assert image.runs == 0

    for _ in range(2):
        await trusting.install(A)
        assert image.runs == 1
    assert list(image.directory.glob("pending")) == []
    await trusting.install("")
    assert image.runs == 2
    await trusting.install("")
    assert image.runs == 2


@pytest.mark.parametrize("left", ["pending", "link", "file"])
async def test_interrupted_ca_update_is_completed(image: Image, left: str) -> None:
    trusting = TrustedCas(Paths())
    await trusting.install("" if left == "link" else A)
    if left == "pending":
        (image.directory / "pending").touch()
    elif left == "link":
        (image.certs / "bosh-trusted-cert-1.pem").symlink_to("gone")
    else:
        image.trusted.write_text("of the image\n")
    before = image.runs

    await trusting.install("" if left == "link" else A)

    assert image.runs == before + 1
    assert (A in image.trusted.read_text()) == (left != "link")


def test_ca_bundle_of_unterminated_certificates_is_split_quickly() -> None:
    assert split("-----BEGIN CERTIFICATE-----" * 40_000) == []
