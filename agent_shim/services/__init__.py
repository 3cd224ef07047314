"""Services that actions call: jobs, scripts, disks, blobs, logs, DNS, users. Services do not import each other."""
