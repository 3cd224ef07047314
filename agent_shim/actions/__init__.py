"""What the Director may ask. Importing the modules of this package registers their actions with ``dispatch``."""
