"""Measurements of aiorl beside plain baselines."""
