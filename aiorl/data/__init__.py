"""Data of sampling and training: batches, fragments, columns, metrics. NumPy only."""
