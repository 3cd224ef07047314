"""The monit control language: text to values and back, and the answers of the ``monit`` command."""
