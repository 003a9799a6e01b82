"""Random faults in whole runs: `python -m benchmarks.chaos`.

`plan` draws the order of the faults from a seed. `faults` defines each kind: its harm, and the
conditions that must hold afterwards. `scenario` drives the campaign. The target is a `cluster`: a
learner, its own workers, and workers that join it through a `link`, a relay that can stall, delay,
corrupt and reset traffic. `progress` reads from the results when trained steps rose; `report`
compares the figures with their bars.
"""
