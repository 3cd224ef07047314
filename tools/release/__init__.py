"""``./dev release``, which builds everything that a release publishes."""
