"""Replay: experience that is kept and drawn many times, on NumPy only.

- `spec`: what a replay holds, what that takes, and whether there is room for it.
- `replay`: rows in, minibatches out.
- `ring`: where rows lie, and the whole of them for a checkpoint, beside training.
- `frames`: frames of observations, each once.
- `pieces`: which of stored experience is there already.
- `sequences`: fragments cut into what recurrent networks are trained through, each a row.
- `priorities`: which rows are drawn.
"""
