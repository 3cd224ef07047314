"""What monit does for jobs: read their files, start, watch, restart and stop their processes."""
