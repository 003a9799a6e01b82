"""What may be set, and how it is put together: defaults < algorithm < YAML file < command line."""
