"""`tierd top`: a terminal window onto the tiers. Fed by snapshots; only `feed.py` talks to the daemon."""
