"""What a captured step communicates with other processes, and what that costs with another number of them.

Costs are those of the ring algorithms with which NCCL and gloo move large tensors: a lower bound for any algorithm that
sends between two processes at a time. Sources: the factors of "bus bandwidth" in ``doc/PERFORMANCE.md`` of nccl-tests,
and ``docs/algorithms.md`` of gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather_into_tensor": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter_tensor": lambda ranks: (ranks - 1) / ranks,
    "all_to_all_single": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0 if ranks > 1 else 0.0,
    "barrier": lambda ranks: 0.0,
}
"""Part of the whole tensor that each process sends; of a broadcast, the one that sends most."""

_MESSAGES: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1),
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter_tensor": lambda ranks: ranks - 1,
    "all_to_all_single": lambda ranks: ranks - 1,
    "broadcast": lambda ranks: ranks - 1,
    "barrier": lambda ranks: (ranks - 1).bit_length(),
}
"""Messages that must follow one another."""


@dataclass(frozen=True)
class CommunicationRecord:
    """One collective of a captured step.

    Attributes:
        operator: name of the functional collective, such as ``"all_reduce"``, or ``"barrier"``.
        dtype: dtype that is sent; "" for a barrier.
        bytes: size of the whole tensor: of an all-gather its result, otherwise its input.
        group_size: number of processes that take part; 0 if it is not known.
        starts: operations of the graph before it starts.
        waited: operations of the graph before its result is waited for.
        nodes: operations of the graph.
    """

    operator: str
    dtype: str
    bytes: int
    group_size: int
    starts: int
    waited: int
    nodes: int

    @property
    def between(self) -> int:
        """Operations of the graph that run while it communicates."""
        return self.waited - self.starts - 1

    def sent(self, ranks: int = 0) -> float:
        """Returns the bytes that a process sends, with ``ranks`` processes; 0: as many as captured."""
        return self.bytes * _SENT[self.operator](ranks or self.group_size)

    def messages(self, ranks: int = 0) -> int:
        """Returns the number of messages that must follow one another; ``ranks`` as for :meth:`sent`."""
        return _MESSAGES[self.operator](ranks or self.group_size)


@dataclass(frozen=True)
class StepCost:
    """Communication of one step.

    Attributes:
        ranks: number of processes.
        collectives: number of collectives.
        sent: bytes that each process sends.
        messages: messages that must follow one another.
    """

    ranks: int
    collectives: int
    sent: float
    messages: int

    def seconds(self, bandwidth: float, latency: float) -> float:
        """Returns the time if nothing overlaps.

        Args:
            bandwidth: bytes per second that a process sends.
            latency: seconds of a message without content.
        """
        return self.sent / bandwidth + self.messages * latency


def scaling(records: Sequence[CommunicationRecord], ranks: Sequence[int]) -> list[StepCost]:
    """Returns the communication of a step for numbers of processes, if its tensors stay the same.

    That is so for data parallelism with the same batch per process, and for sharded parameters.
    """
    return [
        StepCost(
            count,
            len(records),
            sum(record.sent(count) for record in records),
            sum(record.messages(count) for record in records),
        )
        for count in ranks
    ]
