"""For tests, ours and users': environments, fakes, contracts."""
