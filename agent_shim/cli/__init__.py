"""The commands ``agent-shim``, ``bosh-agent``, ``monit`` and ``bpm``. No module imports them."""
