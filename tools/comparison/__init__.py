"""``./dev compare-release PATH…``: run released jobs under the Go agent with monit 5.2.5 and under this agent."""
