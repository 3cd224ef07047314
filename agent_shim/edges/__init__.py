"""Communication with the outside through the bus, heartbeats, alerts, HTTP servers and the control socket."""
