"""A worker: samples under leases and sends what it sampled to a learner."""
