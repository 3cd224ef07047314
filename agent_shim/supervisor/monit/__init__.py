"""The monit control language: parser, and requests of the ``monit`` command."""
