"""A training run: learner, workers, trainers, results, evaluation and export."""
