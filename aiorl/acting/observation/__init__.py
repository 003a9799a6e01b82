"""Preprocessors and running filters of observations."""
