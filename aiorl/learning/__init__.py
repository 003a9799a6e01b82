"""Learning: algorithms, their losses and networks, and the replay. All but `replay` may load TensorFlow."""
