"""Tests how SSH users are created and removed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.host import command
from agent_shim.services import users
from agent_shim.services.users import Users

KEY = "ssh-rsa AAAAB3NzaC1yc2E= jane@laptop with words"


@pytest.fixture
def ours(tmp_path: Path) -> Users:
    return Users(Paths(tmp_path))


@pytest.mark.attack("a request passes an existing account or an option as the name of an SSH user")
@pytest.mark.parametrize(
    "user",
    [
        "",
        "_bosh",
        "9bosh",
        "bosh_A",
        "bosh_a b",
        "bosh_a\n",
        "bosh_a;id",
        "-bosh_a",
        "bosh_" + "a" * 28,
        "bosh_ä",
    ],
)
async def test_invalid_ssh_user_name_is_rejected(ours: Users, user: str) -> None:
    """An invalid name could add an option to a command or a field to a file."""
    with pytest.raises(ActionError, match="^Creating user: cannot use the name "):
        await ours.setup(user, KEY)


async def test_ssh_user_is_created_with_a_key_and_removed_by_expression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(tmp_path)
    paths.is_system, paths.etc = True, tmp_path
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/root:/bin/bash\nvcap:x:1000:1000::/home/vcap:/bin/bash\n")
    ran: list[tuple[str, ...]] = []
    keys: dict[str, str] = {}

    async def run(*argv: str, given: str = "", through: Sequence[str] = (), **_: object) -> str:
        ran.append(argv)
        if argv[0] == "useradd":
            passwd.write_text(passwd.read_text() + f"{argv[-1]}:x:1001:1001::{paths.ssh_home}/{argv[-1]}:/bin/bash\n")
        elif argv[0] == "/bin/sh":
            keys[through[1]] = given
        return ""

    async def remove(user: str) -> None:
        ran.append(("remove", user))

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(users, "remove", remove)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    ours = Users(paths)
    for user in ("bosh_jane", "bosh_joe"):
        await ours.setup(user, KEY)

    assert ours.made() == ["bosh_jane", "bosh_joe"]
    assert keys == {"--reuid=bosh_jane": KEY, "--reuid=bosh_joe": KEY}
    assert ran[:2] == [
        ("useradd", "-m", "-b", str(paths.ssh_home), "-s", "/bin/bash", "bosh_jane"),
        ("usermod", "-G", users.GROUPS, "bosh_jane"),
    ]
    assert await ours.cleanup("^bosh_ja") == ["bosh_jane"]
    assert ran[-1] == ("remove", "bosh_jane")
