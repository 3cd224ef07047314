"""The BOSH agent and monit in one program, for containers and pods."""

__version__ = "0.3.0.dev0"
"""Between releases the next version with `.dev0`. A build adds its commit."""
__revision__ = ""
"""The commit of a build. "" in a checkout."""
