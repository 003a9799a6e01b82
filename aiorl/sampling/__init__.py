"""Sampler as one object, with its environments, policies, filters, readers, writers and
estimators.
"""
