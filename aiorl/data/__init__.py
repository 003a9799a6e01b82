"""What flows: batches, fragments, columns, metrics. NumPy only."""
