"""The commands ``agent-shim``, ``bosh-agent``, ``monit`` and ``bpm``; no module imports them."""
