"""Shared test helpers: real servers, real peers and private directories."""
