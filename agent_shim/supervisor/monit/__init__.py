"""The monit control language: parser, renderer, and requests of the ``monit`` command."""
