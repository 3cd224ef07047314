"""Shared parts of tests: real servers, real peers, private directories."""
