"""What a run says about itself: results, files, plots and the terminal. Never loads TensorFlow."""
