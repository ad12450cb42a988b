"""Keeps freed memory in the process, so that steps do not page-fault for the same memory again and again."""

from __future__ import annotations

from functools import lru_cache

import torch

_LARGEST = (32 << 20) - (64 << 10)
"""Bytes: just below the largest block to which glibc's allocator adapts."""


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Makes the C allocator keep up to 64 MiB that a step has freed, for the next step.

    A step allocates and frees its intermediate tensors. glibc returns blocks from 128 KiB up, and the free end of its
    heap, to the system until it has seen a larger block freed; then it keeps blocks of that size, and twice as much at
    the heap's end. One block of the largest size it adapts to, never written to, is enough. Without this, a small
    convolutional network spends a tenth to a fifth of its step in page faults. Settings made by the user (``MALLOC_*``)
    stay in force, and other allocators are not affected.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
