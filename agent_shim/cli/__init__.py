"""The commands ``agent-shim``, ``bosh-agent``, ``monit`` and ``bpm``. Lower packages never import this one."""
