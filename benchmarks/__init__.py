"""Measurements of aiorl against plain baselines."""
