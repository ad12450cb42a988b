"""What the generated code of a graph runs as its Triton kernels where there is no GPU."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.gpu.simulation.interpreter import run_kernel

_SIZES_ARE_FREE = ("Grid1D", "Grid2D", "Grid3D", "BatchMatmulGrid3D")
"""Grids of Inductor's whose programs are as many as blocks of any size."""

_MOST_ELEMENTS = 2**16
"""Elements of a block up to which it is enlarged."""


class HostMemoryRead(RuntimeError):
    """A kernel of a GPU got memory of the host."""


@dataclass(frozen=True)
class Cubin:
    """A kernel compiled for a GPU.

    Attributes:
        kernel: name of the kernel.
        capability: compute capability of the GPU.
        size: bytes of machine code.
        shared: bytes of shared memory that a block of it uses.
        warps: warps in a block.
    """

    kernel: str
    capability: int
    size: int
    shared: int
    warps: int


@dataclass(frozen=True)
class SimulatedKernel:
    """A Triton kernel of a lowered graph.

    Attributes:
        name: its name in the generated code.
        autotuner: Inductor's object around the Triton function, which knows the sizes of blocks to choose from.
        host: addresses of the storages that a GPU could not read, while the graph runs.
    """

    name: str
    autotuner: Any
    host: set[int] = field(default_factory=set, repr=False)

    def run(self, *args: Any, stream: Any = None) -> None:
        """Runs the kernel by interpreter.

        Raises:
            HostMemoryRead: an argument is a tensor of the host.
            DeviceAssertFailed: an index is out of range.
        """
        kinds = [kind for kind in self.autotuner.triton_meta["signature"].values() if kind != "constexpr"]
        args = tuple(self._given(kind, arg) for kind, arg in zip(chain(kinds, repeat("i32")), args, strict=False))
        config = self._in_few_programs(args)
        args, grid = compat.launch(self.autotuner, args, config)
        asserts = self.autotuner.inductor_meta.get("assert_indirect_indexing", True)
        run_kernel(self.autotuner.fn, args, config.kwargs, grid, asserts)

    def _given(self, kind: str, arg: Any) -> Any:
        """Returns an argument as the kernel gets it: as a number, if it is declared as one."""
        if not isinstance(arg, torch.Tensor):
            return arg
        if not kind.startswith("*"):
            return arg.item()
        if compat.storage_address(arg) in self.host:
            raise HostMemoryRead(f"{self.name} reads a tensor of the host, of shape {tuple(arg.shape)}")
        return arg

    def _in_few_programs(self, args: tuple[Any, ...]) -> Any:
        """Returns the first configuration with blocks so large that two of them suffice for small tensors.

        A program takes milliseconds, however large it is; two of them still differ in what they read.
        """
        chosen = copy.deepcopy(self.autotuner.configs[0])
        if self.autotuner.inductor_meta.get("grid_type") not in _SIZES_ARE_FREE:
            return chosen
        names = [name for name in self.autotuner.triton_meta["signature"] if name not in chosen.kwargs]
        numbers = dict(zip(names, args, strict=False))
        reduced = [size for dim, size in (self.autotuner.size_hints or {}).items() if dim.startswith("r")]
        elements = math.prod(1 << (size - 1).bit_length() for size in reduced)
        for dim in "xyz":
            block, count = f"{dim.upper()}BLOCK", numbers.get(f"{dim}numel")
            if block in chosen.kwargs and isinstance(count, int) and count > 1:
                half = 1 << ((count + 1) // 2 - 1).bit_length()
                chosen.kwargs[block] = max(chosen.kwargs[block], min(half, _MOST_ELEMENTS // elements))
                elements *= chosen.kwargs[block]
        return chosen

    def compile(self, capability: int, every_config: bool = False) -> list[Cubin]:
        """Compiles the kernel for a GPU.

        Args:
            capability: compute capability of the GPU, such as 90.
            every_config: in blocks of all sizes that would be measured, else of the first.
        """
        configs = self.autotuner.configs if every_config else self.autotuner.configs[:1]
        binaries = [compat.binary(self.autotuner, config, capability) for config in configs]
        return [
            Cubin(self.name, capability, len(made.asm["cubin"]), made.metadata.shared, made.metadata.num_warps)
            for made in binaries
        ]
