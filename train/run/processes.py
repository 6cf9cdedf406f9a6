"""One run in several processes: JAX's own runtime, joined before JAX starts its devices."""

import os

import jax

_EXAMPLE = "--coordinator=localhost:1234 --num_processes=2 --process_id=0"


def join(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Makes this process one of several if the arguments or the environment say so.

    Without arguments the environment decides: more than one task of a SLURM step or of Open MPI's
    mpirun, or a TPU, whose hosts JAX finds; else the process stays alone. Waits for the others
    (JAX ends the process if one is missing after five minutes).

    Args:
      coordinator: HOST:PORT at which process 0 will listen and all can reach it.
      num_processes: how many there are.
      process_id: which of them this one is, from 0.

    Raises:
      ValueError: only some of the arguments, impossible ones, or an environment that tells JAX too
        little.
    """
    given = {
        "--coordinator": coordinator,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        if _among_several(os.environ):
            _initialize()
        return
    if missing:
        there = [name for name in given if name not in missing]
        raise ValueError(
            f"{' and '.join(there)} without {' and '.join(missing)}: a process of several needs "
            f"all three; for example {_EXAMPLE}"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"--coordinator={coordinator} must be HOST:PORT of process 0; for example {_EXAMPLE}"
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process_id={process_id} must be one of 0 to --num_processes={num_processes} - 1; "
            f"for example {_EXAMPLE}"
        )
    # What was said in so many words needs nothing from the environment.
    _initialize(
        coordinator_address=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        cluster_detection_method="deactivate",
    )


def _among_several(env: os._Environ | dict[str, str]) -> bool:
    """Whether the environment starts this program in several processes, or JAX has to ask."""
    # Not SLURM_NTASKS, which an interactive shell of a larger allocation has too.
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1 or int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return True
    # JAX itself sets jax_platforms where it finds a TPU.
    if "tpu" not in (jax.config.jax_platforms or "").split(","):
        return False
    hosts = env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES"))
    if hosts is not None:  # GKE
        return "," in hosts or int(env.get("MEGASCALE_NUM_SLICES", 1)) > 1
    return "TPU_SKIP_MDS_QUERY" not in env  # a Google TPU VM, also one that is alone


def _initialize(**arguments: str | int) -> None:
    try:
        # At its end a process waits so long for the others: one that fails alone ends them all.
        jax.distributed.initialize(shutdown_timeout_seconds=60, **arguments)
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(
            f"JAX cannot join the processes of this run ({error}); name them, for "
            f"example {_EXAMPLE}"
        ) from error
