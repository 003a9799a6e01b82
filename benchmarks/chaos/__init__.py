"""Random faults in a whole run: `python -m benchmarks.chaos`.

`plan` draws which kind of fault comes when, from a seed; `faults` has the kinds, what each does and what must hold
after it; `scenario` is the way through. What is struck is a `cluster`: a learner, its own workers, and workers that
join it through a `link`, a relay that can stall, delay, corrupt and reset what it carries. `progress` reads from
results when trained steps rose; `report` holds the figures against their bars.
"""
