"""The agent's external interfaces: the bus, heartbeats, alerts, HTTP servers and the control socket."""
