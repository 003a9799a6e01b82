"""IMPALA: importance-weighted actor-learner architecture."""
