"""Communication with the outside: the bus, heartbeats and alerts, HTTP servers, the control socket."""
