"""CUDA: workspaces of the product library, and captures that failed."""

from __future__ import annotations

import torch

__all__ = ["abandon_capture", "clear_cublas_workspaces"]


def clear_cublas_workspaces() -> None:
    """Frees the workspaces of cuBLAS; the next product allocates one, in the memory pool that is then current."""
    torch._C._cuda_clearCublasWorkspaces()


def abandon_capture(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture in which an operation failed, so that the stream and the random generators are usable again."""
    try:
        graph.capture_end()
    except RuntimeError:  # says that the capture was invalidated; it is over
        pass
    graph.reset()
