"""The notebooks run in Jupyter, which has its own event loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]


def run(name: str, directory: Path) -> list[str]:
    """Run a notebook, which is stored without output, and return the output of its cells as
    text.
    """
    path = EXAMPLES / name
    notebook: Any = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=180, resources={"metadata": {"path": str(directory)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output["output_type"] == "error"]
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)
    return [
        output["data"]["text/plain"]
        for output in shown
        if output["output_type"] == "execute_result"
    ]


def test_t6_the_quickstart_runs_in_jupyter_from_top_to_bottom(tmp_path: Path) -> None:
    values = run("quickstart.ipynb", tmp_path)
    assert float(values[-2].partition("(")[2].rstrip(")") or values[-2]) > 8
    assert values[-1] in ("0", "1", "np.int64(0)", "np.int64(1)")


def test_the_offline_notebook_records_a_policy_clones_it_and_estimates_the_clones_return(
    tmp_path: Path,
) -> None:
    *_, losses, _, compared = run("offline.ipynb", tmp_path)
    first, last = (float(loss) for loss in losses.strip("()").split(","))
    assert last < first
    size, teacher, clone = (
        float(number.strip("np.float64() ")) for number in compared.strip("()").split(",")
    )
    assert size > 2
    assert 0.6 < clone / teacher < 1.5, "the clone reaches its teacher's return"
