"""Data that flows: batches, fragments, columns, metrics. NumPy only."""
