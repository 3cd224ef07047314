"""The agent protocol's actions. Importing the modules in this package registers them with ``dispatch``."""
