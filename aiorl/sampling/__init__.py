"""The sampler with its environments, policies, filters, readers, writers and estimators, as one object."""
