"""Reports of a run: results, files, plots and the terminal. Never loads TensorFlow."""
