"""Actions of the agent protocol. Importing the modules of this package registers them with ``dispatch``."""
