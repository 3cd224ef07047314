"""Packs job logs for ``fetch_logs``, combines them into one stream of lines, and rotates them."""
