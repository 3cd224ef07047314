"""The ``agent-shim``, ``bosh-agent``, ``monit`` and ``bpm`` commands. Lower packages never import this one."""
