"""The commands: ``agent-shim``, ``bosh-agent``, ``monit`` and ``bpm``; nothing imports them."""
