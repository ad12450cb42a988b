"""Answers what Inductor and Triton ask of a CUDA device, on a machine without one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sidefx_train.torch_compat.inductor.patching import replaced, setting
from sidefx_train.torch_compat.recording import TorchDispatchMode

_LIMITS = {
    80: {"name": "NVIDIA A100", "multi_processor_count": 108, "shared_memory_per_block_optin": 166912, "L2": 40},
    90: {"name": "NVIDIA H100", "multi_processor_count": 132, "shared_memory_per_block_optin": 232448, "L2": 50},
}

_UNMEASURED = {"shape_padding": False, "use_static_triton_launcher": False}
"""Settings of Inductor under which it times nothing on the device while it lowers, and keeps what it compiles."""


def device_properties(capability: int) -> Any:
    """Returns the properties of a device of a compute capability, such as 90.

    Raises:
        ValueError: the capability is not one of those that are simulated.
    """
    if capability not in _LIMITS:
        raise ValueError(f"capability {capability} is not one of {sorted(_LIMITS)}")
    known = dict(_LIMITS[capability])
    return types.SimpleNamespace(
        major=capability // 10,
        minor=capability % 10,
        L2_cache_size=known.pop("L2") * 2**20,  # type: ignore[operator]
        total_memory=80 * 2**30,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        gcnArchName="",
        is_integrated=0,
        **known,
    )


_CUDA, _META = 1, 14
"""Numbers of device types in ``c10::DeviceType``."""


@contextmanager
def cuda_guard() -> Iterator[None]:
    """Context in which torch has a device guard for CUDA that does nothing, if there is no such device.

    Several methods of a tensor, such as indexing, ask for the guard of its device, also on fake tensors. Torch does the
    same for fake tensors, but only in its builds for CUDA.
    """
    torch._C._ensureCUDADeviceGuardSet()
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    if before is None:
        guards[_CUDA] = guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


Wrapper = Callable[[Callable[[list[Any]], Any], list[Any]], Callable[[list[Any]], Any]]


@contextmanager
def simulated_cuda(
    capability: int, kernel: Callable[[str, Any], Any] | None = None, wrapper: Wrapper | None = None
) -> Iterator[None]:
    """Context in which there seems to be one CUDA device, though no tensor can be made for it (:func:`on_cpu`).

    Args:
        capability: compute capability of the device.
        kernel: ``kernel(name, autotuner)`` returns the object that generated code runs as a kernel, from Inductor's
            autotuner around the Triton function.
        wrapper: ``wrapper(call, example_inputs)`` returns what is called in place of a compiled graph.
    """
    import triton
    from torch._inductor import compile_fx, config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime import triton_helpers

    with ExitStack() as stack:
        stack.enter_context(cuda_guard())
        for place, names in _answers(capability).items():
            for name, value in names.items():
                stack.enter_context(setting(place, name, value))
        stack.enter_context(setting(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(setting(triton.runtime.driver, "_active", _driver(capability)))
        stack.enter_context(config.patch(_UNMEASURED))
        stack.enter_context(replaced(UniformValueConstantFolder, "_deduce_value", on_cpu))
        if kernel is not None:
            stack.enter_context(setting(AsyncCompile, "triton", _loading(kernel)))
            stack.enter_context(setting(AsyncCompile, "use_process_pool", lambda compiler: False))
        if wrapper is not None:
            stack.enter_context(replaced(compile_fx, "compile_fx_inner", _wrapping(wrapper)))
        with _asked_again():
            yield


def _answers(capability: int) -> dict[Any, dict[str, Any]]:
    """Returns what is replaced: by module or class, names with their values."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor

    facts = device_properties(capability)
    number = lambda *_: 0  # noqa: E731
    nothing = lambda *_: None  # noqa: E731
    about = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": number,
        "get_device_properties": lambda device=None: facts,
        "get_device_capability": lambda device=None: (facts.major, facts.minor),
        "get_device_name": lambda device=None: facts.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "set_device": nothing,
        "synchronize": nothing,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": nothing,
        "_lazy_init": nothing,
        "_exchange_device": number,
        "_maybe_exchange_device": number,
    }
    interface: dict[str, Any] = {
        "is_available": about["is_available"],
        "device_count": about["device_count"],
        "current_device": number,
        "get_device_properties": about["get_device_properties"],
        "get_compute_capability": lambda device=None: capability,
        "is_bf16_supported": about["is_bf16_supported"],
        "set_device": nothing,
        "synchronize": nothing,
        "get_raw_stream": number,
    }
    interface = {name: staticmethod(function) for name, function in interface.items()}
    worker = {name: interface[name] for name in ("current_device", "get_device_properties", "set_device")}
    return {
        torch.cuda: about | {"_DeviceGuard": lambda index: contextlib.nullcontext()},
        CudaInterface: interface,
        CudaInterface.Worker: worker,
        torch._C: {"_cuda_getCurrentRawStream": number},
        fake_tensor: {"init_gpu_context": nothing},
        torch._C._dynamo.guards: {"_empty_strided_cuda": torch._C._dynamo.guards._empty_strided_cpu},
    }


class _AllOnCpu(TorchDispatchMode):
    """Mode in which tensors for a CUDA device are made on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def on_cpu(before: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes its tensors on the CPU where it asks for a CUDA device; they are real ones."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _AllOnCpu():
            return before(*args, **kwargs)

    return run


def _wrapping(wrapper: Wrapper) -> Callable[..., Any]:
    """Returns what replaces Inductor's compilation of a graph."""

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def compile_graph(module: Any, example_inputs: list[Any], **more: Any) -> Any:
            compiled = before(module, example_inputs, **more)
            if getattr(compiled, "current_callable", None) is None:  # a graph that computes nothing
                return wrapper(compiled, example_inputs)
            compiled.current_callable = wrapper(compiled.current_callable, example_inputs)
            return compiled

        return compile_graph

    return make


def _driver(capability: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
    )


def _loading(kernel: Callable[[str, Any], Any]) -> Callable[..., Any]:
    """Returns what loads a kernel for generated code, in this process and without compiling it."""

    def load(compiler: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        from torch._inductor.codecache import PyCodeCache

        return kernel(name, getattr(PyCodeCache.load(source), name))

    return load


def _known_of_device() -> list[Any]:
    """Returns Inductor's functions that remember answers about the device."""
    from torch._inductor import utils
    from torch._inductor.codegen.cuda import cuda_env
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    named = [
        (_triton, [name for name in vars(_triton) if name.startswith(("has_", "_device_", "triton_"))]),
        (utils, ["get_gpu_type", "is_big_gpu", "get_max_num_sms", "get_device_tflops", "get_gpu_dram_gbps"]),
        (cuda_env, ["get_cuda_arch", "is_datacenter_blackwell_arch"]),
        (DeviceProperties, ["create"]),
    ]
    found = [getattr(place, name, None) for place, names in named for name in names]
    return [each for each in found if hasattr(each, "cache_clear")]


@contextmanager
def _asked_again() -> Iterator[None]:
    """Context before and after which Inductor forgets what it knows of the device."""
    known = _known_of_device()
    for each in known:
        each.cache_clear()
    try:
        yield
    finally:
        for each in known:
            each.cache_clear()


@contextmanager
def cpu_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Context in which operators of ``aten`` that have no kernel for the CPU run on CPU tensors.

    Args:
        kernels: what computes them, by their names.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
        yield


def launch(autotuner: Any, args: tuple[Any, ...], config: Any) -> tuple[tuple[Any, ...], tuple[int, int, int]]:
    """Returns the arguments of a kernel and its grid, from those that generated code passes to Inductor's object."""
    return autotuner._interpret_args_grid(args, config)  # type: ignore[no-any-return]


def binary(autotuner: Any, config: Any, capability: int) -> Any:
    """Returns a kernel compiled for a GPU; called within :func:`simulated_cuda`."""
    known = autotuner.device_props
    autotuner.device_props = known._replace(cc=capability, major=capability // 10)
    try:
        return autotuner._precompile_config(config).kernel
    finally:
        autotuner.device_props = known


def math_library() -> Any:
    """Returns the module of CUDA's math library that Inductor's kernels use."""
    from torch._inductor.runtime import triton_helpers

    return triton_helpers.libdevice
