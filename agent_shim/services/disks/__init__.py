"""Persistent disks: volumes that somebody else has mounted, known by identity, brought to ``/var/vcap/store``.

``hints`` reads what a CPI says, ``identity`` knows disks and decides where they belong, ``places`` brings them there,
``service`` is what actions use.
"""

from agent_shim.services.disks.service import Disks, Patience

__all__ = ["Disks", "Patience"]
