"""Runs every entry of torch's own lists captured through ``aot_eager`` and compares it with eager: operators, modules
(``module ...``), autograd functions (``function ...``) and higher-order operators (``hop ...``). Poolings and
normalizations over odd sizes (``layer ...``) go through Inductor.

    python tests/opinfo/run.py                   all of them, progress, a table
    python tests/opinfo/run.py softmax "linalg"  those whose names contain one of these
    python tests/opinfo/run.py -v svd            with the reasons for eager fallbacks

Exits with 1 if an operator that ``known_differences.toml`` does not list differs or falls back to eager, if a listed
one agrees, or if more than ``MOST`` percent of the operators are listed, as differing or as falling back.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

import torch  # noqa: E402

from tests.opinfo.layers import LayerInfo, check_layers, layer_entries  # noqa: E402
from tests.opinfo.modules import check_module  # noqa: E402
from tests.opinfo.variants import Result, run, variants  # noqa: E402

MOST = 2.0
"""Largest percentage of the operators that may be listed as differing from eager or falling back to it."""

SECONDS, LAYER_SECONDS = 120, 900
"""Time limits of one operator, and of a group of layers, which Inductor compiles as one step, in seconds."""


def operators() -> dict[str, Any]:
    """Returns the ``OpInfo`` objects by full name."""
    from torch.testing._internal import common_methods_invocations as invocations
    from torch.testing._internal.common_methods_invocations import op_db

    # The import forbids `torch.backends.cudnn.benchmark = ...` for the rest of the process; other tests set it.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

    # Random operators seed themselves there, which a captured step must not do; here each run is seeded from outside.
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {op.full_name: op for op in op_db}


def entries() -> dict[str, Any]:
    """Returns operators and the entries of torch's other lists, by name."""
    from torch.testing._internal.autograd_function_db import autograd_function_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.hop_db import hop_db

    found = operators()
    found |= {f"function {op.full_name}": op for op in autograd_function_db}
    found |= {f"hop {op.full_name}": op for op in hop_db}
    return found | {f"module {info.name}": info for info in module_db} | layer_entries()


def known_differences() -> dict[str, tuple[str, str]]:
    """Returns (kind, reason) of operators that are not expected to agree or to be captured."""
    with open(os.path.join(HERE, "known_differences.toml"), "rb") as file:
        listed = tomllib.load(file)
    known: dict[str, tuple[str, str]] = {}
    for kind in ("differs", "left", "undefined"):
        for entry in listed.get(kind, []):
            if torch.torch_version.TorchVersion(torch.__version__) < entry.get("since", "2.0"):
                continue
            for name in entry["operators"]:
                assert name not in known, f"{name} is listed twice"
                known[name] = (kind, entry["reason"])
    return known


def check(op: Any, contents: bool = True) -> list[Result]:
    """Runs all variants of one entry, on its first sample."""
    if hasattr(op, "module_cls"):
        return check_module(op)
    if isinstance(op, LayerInfo):
        return check_layers(op)
    found: list[Result] = []
    if not op.dtypes:
        return [Result("value", "captured", "nothing for the CPU")]
    kind = torch.float32 if torch.float32 in op.dtypes else next(iter(sorted(op.dtypes, key=str)))
    for differentiable in (True, False) if _differentiable(op, kind) else (False,):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = next(iter(op.sample_inputs("cpu", kind, requires_grad=differentiable)), None)
            if sample is None:
                continue
            given = (sample.input, tuple(sample.args), dict(sample.kwargs))
            for variant in variants(op, sample, differentiable):
                if variant.requires_grad == differentiable:
                    found.append(run(variant, given, sample.output_process_fn_grad, contents))
    return found


def _differentiable(op: Any, kind: torch.dtype) -> bool:
    return bool(op.supports_autograd) and kind in op.supported_backward_dtypes("cpu")


def _one(name: str) -> tuple[str, float, list[Result]]:
    """Runs one operator in a worker."""
    global _DB
    if _DB is None:
        _DB = entries()
        faulthandler.enable()
    began = time.perf_counter()

    seconds = LAYER_SECONDS if name.startswith("layer ") else SECONDS

    def late(*_: Any) -> None:
        raise TimeoutError(f"no result after {seconds} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    contents = known_differences().get(name, ("", ""))[0] != "undefined"
    try:
        found = check(_DB[name], contents)
    except Exception as error:
        found = [Result("-", "differs", f"{type(error).__name__}: {error}")]
    finally:
        signal.alarm(0)
    return name, time.perf_counter() - began, found


_DB: dict[str, Any] | None = None


def outcomes(names: Sequence[str], jobs: int) -> Iterable[tuple[str, float, list[Result]]]:
    """Yields results as they are ready."""
    if jobs <= 1:
        yield from map(_one, names)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_one, names, chunksize=4)


def state_of(found: list[Result]) -> str:
    """Returns the worst state of an operator's variants."""
    states = {result.state for result in found}
    return next((state for state in ("differs", "left") if state in states), "captured")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of operators' names")
    parser.add_argument("-v", "--verbose", action="store_true", help="show why operators were left to eager")
    parser.add_argument("-j", "--jobs", type=int, default=int(os.environ.get("JOBS", "2")))
    parser.add_argument("--every", type=int, default=1, help="only every n-th operator")
    options = parser.parse_args(argv)
    wanted = [n for n in entries() if not options.names or any(part in n for part in options.names)][:: options.every]
    known = known_differences()
    tally: Counter[str] = Counter()
    of_variant: dict[str, Counter[str]] = {}
    bad: list[str] = []
    began = time.perf_counter()
    for count, (name, _, found) in enumerate(outcomes(wanted, options.jobs), 1):
        state = state_of(found)
        tally[state] += 1
        for result in found:
            of_variant.setdefault(result.variant, Counter())[result.state] += 1
        listed = known.get(name, ("captured", ""))[0].replace("undefined", "captured")
        if state != listed:
            new = [
                f"{name} [{r.variant}] {r.state}: {r.why}" for r in found if r.state == state and r.state != "captured"
            ]
            new += [f"{name} is listed as {listed!r} and is {state}"] if listed != "captured" else []
            print("\n".join(new), file=sys.stderr, flush=True)  # at once: the rest may take long
            bad += new
        if options.verbose:
            bad += [
                f"({name} [{r.variant}] {r.state}: {r.why})"
                for r in found
                if state == listed and r.state == state != "captured"
            ]
        if count % 20 == 0 or count == len(wanted):
            spent = time.perf_counter() - began
            print(f"{count:4}/{len(wanted)} entries, {spent:4.0f} s: {dict(tally)}", file=sys.stderr, flush=True)
    print(f"{'variant':20}{'captured':>10}{'left':>8}{'differs':>9}")
    for variant, counts in of_variant.items():
        print(f"{variant:20}{counts['captured']:10}{counts['left']:8}{counts['differs']:9}")
    print(f"{'entries':20}{tally['captured']:10}{tally['left']:8}{tally['differs']:9}")
    listed_as = Counter(kind for name, (kind, _) in known.items() if name in operators())
    count = listed_as["differs"] + listed_as["left"]
    share = 100 * count / len(operators())
    print(
        f"of {len(operators())} operators are listed: {listed_as['differs']} that differ, {listed_as['left']} left to "
        f"eager, {share:.2f} percent ({MOST:.2f} at most)"
    )
    if share > MOST:
        bad.append(f"{share:.2f} percent of the operators are listed")
    print("\n".join(bad))
    return 1 if any(not line.startswith("(") for line in bad) else 0


if __name__ == "__main__":
    raise SystemExit(main())
