"""Persistent disks. A disk is a volume that is already mounted somewhere in the container. The agent identifies it by a
marker and mounts it at ``/var/vcap/store``.

``hints`` parses the hints that a CPI sends, ``markers`` reads and writes markers, ``decisions`` decides where each disk
belongs, ``mounting`` mounts it there, and ``service`` is the interface for actions.
"""

from agent_shim.services.disks.service import Disks, DiskTimeouts

__all__ = ["DiskTimeouts", "Disks"]
