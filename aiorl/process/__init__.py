"""Processes on one host: starting, watching, restarting and ending workers."""
