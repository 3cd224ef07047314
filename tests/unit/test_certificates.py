"""How a bundle of certificates is taken apart, and that a machine that is not ours is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_shim import certificates
from agent_shim.certificates import Certificates, split
from agent_shim.paths import Paths

A = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
B = "-----BEGIN CERTIFICATE-----\nBBBB\n-----END CERTIFICATE-----"


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
    ],
)
def test_a_bundle_is_taken_apart(bundle: str, found: list[str]) -> None:
    """What stands between certificates is dropped."""
    assert split(bundle) == [f"{pem}\n" for pem in found]


async def test_below_another_base_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is said."""
    monkeypatch.setattr(certificates, "DIRECTORY", tmp_path / "certificates")
    monkeypatch.setattr("os.geteuid", lambda: 0)

    assert await Certificates(Paths(tmp_path)).install(A) == "not root of a container with the real /var/vcap"
    assert not (tmp_path / "certificates").exists()


async def test_an_ordinary_user_installs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be said against it: jobs bring authorities of their own."""
    monkeypatch.setattr(certificates, "DIRECTORY", tmp_path / "certificates")
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    assert await Certificates(Paths()).install(A) == "not root of a container with the real /var/vcap"
    assert not (tmp_path / "certificates").exists()
