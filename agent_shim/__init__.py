"""The BOSH agent and monit in one program, for containers and pods."""

__version__ = "0.3.0.dev0"
"""Between releases this is the next version with `.dev0`. A build appends its commit."""
__revision__ = ""
"""The commit from which a build was made, or "" in a checkout."""
