"""Where experience begins: environments by name, stepped in lockstep."""
