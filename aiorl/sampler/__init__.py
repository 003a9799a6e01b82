"""Environments and a policy in, fragments out."""
