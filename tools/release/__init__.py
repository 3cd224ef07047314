"""``./dev release``: everything that a release publishes."""
