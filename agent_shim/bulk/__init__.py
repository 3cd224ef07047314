"""Bulk work in worker processes: blob transfers, archives, log rotation and disk copies."""
