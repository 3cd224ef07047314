"""``./dev compare-release PATH…``: run jobs of releases under the Go agent with monit 5.2.5 and under this agent."""
