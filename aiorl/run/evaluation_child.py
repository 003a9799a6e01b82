"""The process that evaluates checkpoints for a learner: requests come on standard input, results go to standard output.

A line each, JSON: ``{"checkpoint": path, "episodes": 10, "seed": 1, "explore": false, "config": {}}``, answered by what
`Evaluation.to_dict` gives, or by ``{"error": text}``. It ends with its standard input, whatever it does.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from typing import Any

from aiorl.errors import AiorlError
from aiorl.process.children import watch_parent
from aiorl.process.imports import find_modules_here
from aiorl.run.evaluation import evaluate


def main() -> int:
    """Evaluate until standard input ends; the exit status is 0."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    find_modules_here()
    os.dup2(2, 1)  # what environments print is no answer
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    watch_parent(lambda: lines.put(None), on_line=lines.put)
    while (line := lines.get()) is not None:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()
    return 0


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return evaluate(request.pop("checkpoint"), **request).to_dict()
    except AiorlError as error:
        return {"error": str(error)}
    except Exception as error:
        # whatever a user's code raises
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
