"""Policy gradient."""
