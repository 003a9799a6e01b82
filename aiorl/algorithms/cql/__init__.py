"""Conservative Q-learning."""
