"""Worker: samples under leases and sends fragments to a learner."""
