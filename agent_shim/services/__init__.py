"""Services that actions call: jobs, scripts, disks, blobs, logs, DNS and users. Services do not import each other."""
