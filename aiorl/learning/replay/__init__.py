"""Replay: experience that is stored and drawn many times, with NumPy only.

- `spec`: contents of a replay, its size, and the check that there is room for it.
- `replay`: rows in, minibatches out.
- `ring`: slots of the rows, and snapshots for checkpoints during training.
- `episodes`: a replay that knows which rows belong to one episode.
- `frames`: frames of observations, each stored once.
- `sequences`: fragments cut into sequences for recurrent networks, each an entry of the replay.
- `priorities`: probabilities with which rows are drawn.
"""
