"""``python -m sidefx_train doctor``: describes the installation, runs a small step on each backend, for bug reports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import time
import warnings
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from sidefx_train import disk_cache
from sidefx_train.compile import torch_support
from sidefx_train.config import CompileConfig
from sidefx_train.errors import SideFXError, SideFXWarning
from sidefx_train.switches import switched_off

PACKAGES = (
    "sidefx-train",
    "lightning",
    "pytorch-lightning",
    "torchmetrics",
    "transformers",
    "triton",
    "numpy",
    "bytecode",
    "rich",
)
BACKENDS = ("eager", "aot_eager", "inductor")

_GOOD, _BAD = "[green]ok[/]", "[red]failed[/]"


def doctor(console: Console) -> bool:
    """Prints the installation and the results of the checks.

    Builds the native modules that are missing and compiles one step, which takes up to a minute with an empty cache.

    Returns:
        True if all checks passed.
    """
    installation = Table(show_header=False, title="installation", title_justify="left")
    for name, text in described():
        installation.add_row(name, text)
    console.print(installation)
    checks = Table("check", "result", "what was found", title="checks", title_justify="left")
    passed = True
    with console.status("checking (up to a minute with an empty cache)"):
        for name, good, text in (*_supported(), *_modules(), *_steps()):
            passed = passed and good
            checks.add_row(name, _GOOD if good else _BAD, text)
    console.print(checks)
    console.print("all is well" if passed else "some checks failed: please add this output to a bug report")
    return passed


def described() -> list[tuple[str, str]]:
    """Returns what is installed, as pairs of a name and its description."""
    flags = [name for name in ("avx512f", "avx2") if name in _cpu().get("flags", "").split()]
    compiler = os.environ.get("CXX") or shutil.which("g++")
    size = sum(entry.size for entry in disk_cache.entries())
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("SIDEFX_")]
    found = [
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__} ({torch.version.git_version})"),
        *((name, version) for name in PACKAGES if (version := _version(name)) is not None),
        (
            "C++ compiler",
            _first_line([compiler, "--version"]) if compiler else "none: native modules are not built",
        ),
        ("CPU", f"{_cpu().get('model name', platform.processor())}, {os.cpu_count()} cores {' '.join(flags)}".strip()),
        ("GPU", _gpus()),
        ("cache", f"{disk_cache.cache_dir()}: {decimal(size)} of {decimal(disk_cache.limit_bytes())}"),
    ]
    if variables:
        found.append(("environment", ", ".join(variables)))
    if switched_off():
        found.append(("switched off", ", ".join(sorted(switched_off()))))
    return found


def _supported() -> list[tuple[str, bool, str]]:
    if not torch_support.reads_bytecode():
        return [("Python", False, str(torch_support.unsupported()))]
    tested = "tested" if torch_support.is_tested() else f"not tested; tested are {', '.join(torch_support.TESTED)}"
    if torch_support.IMPORT_ERROR is not None:
        return [("torch", False, str(torch_support.unsupported()))]
    failure = torch_support.self_test()
    return [
        ("Python", True, "supported"),
        ("torch", failure is None, f"{tested}; {failure or 'the self-test of captures passed'}"),
    ]


def _modules() -> list[tuple[str, bool, str]]:
    if torch_support.IMPORT_ERROR is not None:
        return []
    from sidefx_train.compile.native import build_all

    return [
        (f"native module: {label}", not failure, failure or "built") for label, failure in sorted(build_all().items())
    ]


def _steps() -> list[tuple[str, bool, str]]:
    found = [(f"step, backend={backend!r}", *_step(backend)) for backend in BACKENDS]
    if torch.cuda.is_available():
        found.append(("step on the GPU", *_step("inductor", "cuda")))
    return found


def _step(backend: Any, device: str = "cpu") -> tuple[bool, str]:
    """Trains a small model for three steps eagerly and captured, and compares the parameters."""
    began = time.perf_counter()
    compiled = None
    try:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always", SideFXWarning)
            want, _ = _trained(None, device)
            got, compiled = _trained(CompileConfig(backend=backend), device)
    except (SideFXError, RuntimeError, AttributeError, TypeError) as error:
        return False, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    took = time.perf_counter() - began
    off = max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True))
    report = compiled.report()
    said = [str(warning.message).splitlines()[0] for warning in shown if issubclass(warning.category, SideFXWarning)]
    captured = report.replays == 3 and report.graph_count == 1
    limit = 0.0 if backend == "eager" else 1e-5 if device == "cpu" else 1e-3
    text = f"{report.replays} of 3 calls replayed, largest difference {off:.1e}, {took:.1f} s"
    graph = report.captures[0].cuda_graph if report.captures else None
    if graph is not None:
        text += f", {graph.replays} by CUDA graph"
        captured = captured and graph.recordings == 1
        said += [graph.refused] if graph.refused else []
    return captured and off <= limit, "; ".join([text, *said])


def _trained(config: CompileConfig | None, device: str) -> tuple[list[torch.Tensor], Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 16), (16, 4))
    weights = [torch.randn(shape, generator=generator).div(4).to(device).requires_grad_() for shape in shapes]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy((x @ weights[0]).relu() @ weights[1], y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call: Any = step if config is None else torch_support.make_step(step, config)
    for _ in range(3):
        batch = torch.randn(32, 8, generator=generator), torch.randint(4, (32,), generator=generator)
        call(*(each.to(device) for each in batch))
    return [weight.detach() for weight in weights], call


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str:
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return f"{command[0]}: {shown[0]}" if shown else command[0]


def _cpu() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo") as info:
            pairs = (line.partition(":") for line in info)
            return {name.strip(): value.strip() for name, _, value in pairs if value}
    except OSError:
        return {}


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none" if torch.version.cuda is None else f"none (this torch is built for CUDA {torch.version.cuda})"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(names)} (CUDA {torch.version.cuda})"
