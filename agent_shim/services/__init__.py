"""Services that actions call: jobs, scripts, disks, blobs, logs, DNS, users. None imports another."""
