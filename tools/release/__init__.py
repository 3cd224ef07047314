"""``./dev release``: build everything that a release publishes."""
