"""A learner with updates that take SLOW_S seconds each, from update SLOW_FROM on."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from aiorl.learner import main
from aiorl.run.policy_group import PolicyGroup

update = PolicyGroup.update
number = 0


def slow_update(self: PolicyGroup, *args: Any) -> Any:
    global number
    number += 1
    if number >= int(os.environ["SLOW_FROM"]):
        sys.stderr.write(f"update {number} begins\n")
        time.sleep(float(os.environ["SLOW_S"]))
        sys.stderr.write(f"update {number} ends\n")
    return update(self, *args)


PolicyGroup.update = slow_update  # type: ignore[method-assign]

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
