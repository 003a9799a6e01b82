"""Stored experience: sources and destinations of batches, and estimates of another policy's return
on them.
"""
