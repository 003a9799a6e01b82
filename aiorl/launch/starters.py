"""Facts that starters of N copies give each: its rank, how many there are, where the first one is.

Schedulers, MPI and clouds put it into environment variables; SageMaker puts it into a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aiorl.config.addresses import split_address, url
from aiorl.config.files import parse_json, read_regular
from aiorl.errors import ConfigError

__all__ = ["RANK_VARIABLES", "RESOURCES", "Copy", "Main", "copy_of", "main_of"]

RANK_VARIABLES = (
    ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),  # torchrun and many others, or the user
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PALS_RANKID", "PALS_LOCAL_SIZE", ""),  # Cray's PALS
    ("PMI_RANK", "MPI_LOCALNRANKS", "PMI_SIZE"),  # MPICH, Intel MPI
    ("PMIX_RANK", "", ""),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE", "JSM_NAMESPACE_SIZE"),  # LSF's jsrun
    ("FLUX_TASK_RANK", "", "FLUX_JOB_SIZE"),
    ("SLURM_PROCID", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
    ("PBS_NODENUM", "", ""),  # pbsdsh
    ("PET_NODE_RANK", "", "PET_NNODES"),  # Kubeflow's torch policy
    ("JOB_COMPLETION_INDEX", "", ""),  # an indexed Job of Kubernetes
    ("AWS_BATCH_JOB_NODE_INDEX", "", "AWS_BATCH_JOB_NUM_NODES"),
    ("SKYPILOT_NODE_RANK", "", "SKYPILOT_NUM_NODES"),
    ("NODE_RANK", "", ""),
)
"""Variables with a copy's rank, with the number of copies on its host, and with that of all copies;
the first that is set counts.

Those of MPI come first, because schedulers start its daemons and set their own variables for them.
"""
RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
"""File that SageMaker puts into its containers."""
_VERTEX = "CLUSTER_SPEC"
_VERTEX_MAIN = "workerpool0"
_AWS_MAIN = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_MAIN_VARIABLES = (
    "MASTER_ADDR",  # torchrun, Azure ML
    "PET_MASTER_ADDR",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
    "SKYPILOT_NODE_IPS",  # one on each line, by rank
)
_MAX_BYTES = 1 << 20


class Copy(NamedTuple):
    """One of the copies.

    Attributes:
        rank: its rank; 0 is the learner.
        source: variable or file that says so.
        together: number of copies on its host.
        copies: number of all copies; 0 if that is unknown.
    """

    rank: int
    source: str
    together: int = 1
    copies: int = 0


class Main(NamedTuple):
    """Host of the copy with rank 0.

    Attributes:
        host: its name or address; "" where only the others get it.
        source: variable or file that says so.
    """

    host: str
    source: str


def copy_of(environment: Mapping[str, str]) -> Copy:
    """Return which of the copies this is.

    Args:
        environment: environment variables of this process.

    Raises:
        ConfigError: nothing says so, or what says so makes no sense.
    """
    for variable, together, copies in RANK_VARIABLES:
        rank = environment.get(variable, "")
        if rank.isdecimal():
            return Copy(
                rank=_rank_on_aws(int(rank), environment) if "AWS" in variable else int(rank),
                source=variable,
                together=_number(environment, together, default=1),
                copies=_number(environment, copies, default=0),
            )
    vertex = _vertex(environment)
    if vertex is not None:
        pools, task = vertex
        is_main = task == (_VERTEX_MAIN, 0)
        return Copy(0 if is_main else 1, _VERTEX, copies=sum(len(pool) for pool in pools.values()))
    if RESOURCES.exists():
        hosts, current = _sagemaker()
        return Copy(hosts.index(current), str(RESOURCES), copies=len(hosts))
    names = ", ".join(name for name, *_ in RANK_VARIABLES)
    raise ConfigError(
        f"No variable says which copy this is: none of {names}, {_VERTEX} is set.",
        key="RANK",
        hint=(
            "Start the copies with srun or mpirun, or set RANK to 0 for the learner and to 1, 2,"
            " ... for the others."
        ),
    )


def main_of(environment: Mapping[str, str]) -> Main | None:
    """Return where the copy with rank 0 is; None if nothing says so.

    Args:
        environment: environment variables of this process.

    Raises:
        ConfigError: what says so makes no sense.
    """
    for variable in _MAIN_VARIABLES:
        host, *_ = environment.get(variable, "").split() or [""]
        if host:
            return _checked(host, variable)
    if _AWS_MAIN in environment:
        return Main("", _AWS_MAIN)
    vertex = _vertex(environment)
    if vertex is not None:
        pools, _ = vertex
        address = pools[_VERTEX_MAIN][0]
        host, _ = split_address(address if "://" in address else f"tcp://{address}", key=_VERTEX)
        return Main(host, _VERTEX)
    if RESOURCES.exists():
        hosts, _ = _sagemaker()
        return _checked(hosts[0], str(RESOURCES))
    return None


def _checked(host: str, source: str) -> Main:
    split_address(url(host, 1), key=source)
    return Main(host, source)


def _rank_on_aws(index: int, environment: Mapping[str, str]) -> int:
    """Return the rank of a node; AWS Batch lets users choose the main one."""
    main = _number(environment, _AWS_MAIN, default=0)
    if index == main:
        return 0
    return index + 1 if index < main else index


def _number(environment: Mapping[str, str], variable: str, *, default: int) -> int:
    number = environment.get(variable, "").partition("(")[0]  # Slurm writes 2(x3),1
    return int(number) if number.isdecimal() else default


def _vertex(environment: Mapping[str, str]) -> tuple[dict[str, list[str]], tuple[str, int]] | None:
    """Return the addresses in each pool of a custom job of Vertex AI, and pool and index of this
    copy; None elsewhere.
    """
    if _VERTEX not in environment:
        return None
    try:
        spec = parse_json(environment[_VERTEX].encode())
        pools = spec["cluster"]
        task = (spec["task"]["type"], spec["task"]["index"])
        for pool in pools.values():
            _check_names(pool)
        if not isinstance(pools[task[0]][task[1]], str) or not pools[_VERTEX_MAIN]:
            raise ValueError("it has no such task")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _senseless(_VERTEX, environment[_VERTEX], error) from error
    return pools, task


def _sagemaker() -> tuple[list[str], str]:
    """Return the names of all hosts in order, and that of this one."""
    text = ""
    try:
        content = read_regular(RESOURCES, max_bytes=_MAX_BYTES, follow=True)
        text = content.decode(errors="replace")
        facts: dict[str, Any] = parse_json(content)
        hosts = facts["hosts"]
        _check_names(hosts)
        if facts["current_host"] not in hosts:
            raise ValueError("current_host is not in hosts")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _senseless(str(RESOURCES), text, error) from error
    return sorted(hosts), facts["current_host"]  # each host gets them in an order of its own


def _check_names(names: Any) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{names!r:.50} is no list of names")


def _senseless(source: str, text: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{source} makes no sense: {error!r:.100}, in {text!r:.200}.",
        key=source,
        hint="Set RANK, and give --address tcp://HOST:PORT.",
    )
