"""Stored experience: where batches are read from and written to, and what another policy would have earned on them."""
