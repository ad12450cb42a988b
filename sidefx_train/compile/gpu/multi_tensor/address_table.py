"""Where a multi-tensor kernel finds its tensors: numbers in static memory of the device.

| entries | contents |
|---|---|
| 1 | number of tensors of one slot |
| one a program | its chunk: index of the tensor, first element |
| one a tensor | number of elements |
| one a slot and tensor | address |

A table that a recording contains is never written again. It is filled behind the recording, since a copy in it would
be recorded; its memory was allocated before, since what is allocated in a recording belongs to the recording's pool,
which others write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from sidefx_train.compile.gpu.multi_tensor.expression import CHUNK_SHIFT

BLOCK = 1024
"""Elements of a chunk."""

_MOST_KNOWN = 8
"""Tables that are kept for calls outside of recordings: gradients are at one of a few addresses."""

Filling = tuple[torch.Tensor, list[int]]
"""A table and the numbers that it gets behind the recording."""

_filled_later: ContextVar[list[Filling] | None] = ContextVar("filled_later", default=None)


@contextmanager
def tables_of_recording() -> Iterator[list[Filling]]:
    """Context of a recording; yields the list of its tables, which must live as long as the recording.

    Behind it, the tables are filled.
    """
    tables: list[Filling] = []
    token = _filled_later.set(tables)
    try:
        yield tables
    finally:
        _filled_later.reset(token)
    for table, numbers in tables:
        table.copy_(torch.tensor(numbers))


def is_recording() -> bool:
    """Returns True within :func:`tables_of_recording`."""
    return _filled_later.get() is not None


class AddressTables:
    """The tables of one call in generated code.

    Args:
        sizes: number of elements of each tensor.

    Attributes:
        chunks: number of programs that the kernel needs.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        chunks = [index << CHUNK_SHIFT | start for index, size in enumerate(sizes) for start in range(0, size, BLOCK)]
        self.chunks = len(chunks)
        self._head = [len(sizes), *chunks, *sizes]
        self._known: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._spare: torch.Tensor | None = None
        """Memory for the next recording."""

    def table(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns a table with the present addresses of tensors, which has its contents when a kernel reads it.

        Raises:
            RuntimeError: a recording needs a table, but no call outside of one has come before it.
        """
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        later = _filled_later.get()
        if later is not None:
            if self._spare is None:
                raise RuntimeError("a recording needs an address table, and no memory was allocated for one")
            table, self._spare = self._spare, None
            later.append((table, [*self._head, *addresses]))
            return table
        if self._spare is None:
            length = len(self._head) + len(addresses)
            self._spare = torch.empty(length, dtype=torch.int64, device=tensors[0].device)
        return self._known_table(addresses, tensors[0].device)

    def _known_table(self, addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
        table = self._known.get(addresses)
        if table is None:
            table = self._known[addresses] = torch.tensor([*self._head, *addresses], device=device)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(addresses)
        return table
