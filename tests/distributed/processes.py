"""Runs a function in two or more processes of a gloo group, with a deadline that shows where each of them stands."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = int(os.environ.get("SIDEFX_TEST_PROCESSES", "2"))
"""Number of processes; ``make distributed`` runs the programs of ``DistributedDataParallel`` with four."""
_MARGIN = 20
"""Seconds after the deadline, at which a process ends itself, until it is killed."""

_PRELOADED = ["sidefx_train", "lightning.pytorch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
"""What the server imports from which processes are forked: to import it takes longer than most tests."""


def in_two_processes(work: Any, *args: Any, seconds: int = 240) -> None:
    """Runs ``work(rank, *args)`` in :data:`WORLD` processes.

    Args:
        work: a function of a test module.
        args: its arguments.
        seconds: deadline for two processes, after which every process prints its stacks and ends.

    Raises:
        AssertionError: a process failed or did not end; the message has the output of all.
    """
    folder, seconds = Path(tempfile.mkdtemp()), seconds * WORLD // 2
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    given = (folder, seconds, dict(os.environ), args)
    ranks = [context.Process(target=_rank, args=(work, rank, *given)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds + _MARGIN)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hung:
        ranks[rank].kill()
        ranks[rank].join()
    if hung or any(process.exitcode for process in ranks):
        said = "\n".join(f"--- rank {rank}\n{(folder / str(rank)).read_text()}" for rank in range(WORLD))
        raise AssertionError(f"exit codes {[process.exitcode for process in ranks]}\n{said}")


def _rank(work: Any, rank: int, folder: Path, seconds: int, environment: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)  # the server has the environment of the first test
    with open(folder / str(rank), "w") as output:
        sys.stdout = sys.stderr = output
        faulthandler.dump_traceback_later(seconds, exit=True, file=output)
        code = 1
        try:
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=WORLD)
            work(rank, *args)
            dist.barrier()
            code = 0
        except BaseException:
            traceback.print_exc()
        output.flush()
        os._exit(code)  # the other rank may wait in a collective; gloo's threads may crash an ordinary exit


def agree(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor is the same on all ranks, bit for bit."""
    others = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(others, tensor.detach().contiguous())
    return all(torch.equal(other, others[0]) for other in others)
