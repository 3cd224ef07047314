"""Persistent disks: volumes that are already mounted somewhere in the container. They are identified by markers and
mounted at ``/var/vcap/store``.

``hints`` parses what a CPI sends, ``markers`` identifies disks and decides where they belong, ``mounting`` mounts them
there, ``service`` is the interface for actions.
"""

from agent_shim.services.disks.service import Disks, DiskTimeouts

__all__ = ["DiskTimeouts", "Disks"]
