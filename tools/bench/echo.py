"""``python -m tools.bench.echo CONFIG``: the smallest possible agent, which answers every request with pong.

It consists of little more than Python and nats-py. No agent that uses them can start or answer faster, or need less
memory.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import tempfile
from pathlib import Path
from typing import Any

import nats


async def serve(settings: dict[str, Any]) -> None:
    """Connect with the settings written by a CPI, and answer requests forever."""
    mbus = settings["env"]["bosh"]["mbus"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=mbus["cert"]["ca"])
    context.check_hostname = False
    with tempfile.NamedTemporaryFile("w") as pair:
        pair.write(mbus["cert"]["certificate"] + "\n" + mbus["cert"]["private_key"])
        pair.flush()
        context.load_cert_chain(pair.name)
    client = await nats.connect(mbus["urls"], tls=context)

    async def answer(message: Any) -> None:
        await client.publish(json.loads(message.data)["reply_to"], b'{"value":"pong"}')

    await client.subscribe(f"agent.{settings['agent_id']}", cb=answer)
    await asyncio.Event().wait()


if __name__ == "__main__":
    config = json.loads(Path(sys.argv[1]).read_text())
    source = config["Infrastructure"]["Settings"]["Sources"][0]["SettingsPath"]
    asyncio.run(serve(json.loads(Path(source).read_text())))
