"""Bulk work in worker processes: transfers of blobs, archives, rotation of logs, copies of disks."""
