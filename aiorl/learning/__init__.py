"""Learning: algorithms, their losses and networks, and the replay.

Only `replay` never loads TensorFlow.
"""
