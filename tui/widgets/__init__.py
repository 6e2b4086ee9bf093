"""The panels of `tierd top`, one a file."""
