"""Runs CPython's own tests interpreted, and compares the results with the list of known differences.

    python tests/cpython/run.py                              all modules, a table
    python tests/cpython/run.py test_with test_generators    some
    python tests/cpython/run.py -v test_with:test_nested     some cases, with the tracebacks of those that differ

Each module runs in its own process. Exits with 1 if a case differs that ``known_differences.toml`` does not list,
if a listed one passes or does not exist, or if fewer than ``LEAST`` percent pass. Needs a Python with its ``test``
package, and no torch.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
LEAST = 95.0
"""Percent of each run's cases that must pass; known differences count as failures."""

TIMEOUT = 600
"""Time limit of one module, in seconds."""

KNOWN = os.path.join(HERE, "known_differences.toml")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_MARK = "@@ result "


def modules() -> list[str]:
    """Returns the modules of a complete run on this version of Python."""
    with open(KNOWN, "rb") as file:
        listed: dict[str, list[str]] = tomllib.load(file)["modules"]
    return [name for versions, names in listed.items() if versions in ("all", VERSION) for name in names]


def known_differences() -> dict[str, dict[str, str]]:
    """Returns the cases known to differ on this version of Python, by module, with their reasons."""
    with open(KNOWN, "rb") as file:
        entries = tomllib.load(file)["difference"]
    known: dict[str, dict[str, str]] = {}
    for entry in entries:
        if VERSION in entry.get("python", [VERSION]):
            for case in entry["cases"]:
                of_module = known.setdefault(entry["module"], {})
                assert case not in of_module, f"{entry['module']} lists {case} twice"
                of_module[case] = entry["reason"]
    return known


def in_process_of_its_own(name: str) -> dict[str, Any]:
    """Runs one module; returns ``cases``, ``failures`` and ``left`` (not passed by CPython here), or ``error``."""
    command = [sys.executable, os.path.abspath(__file__), "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {TIMEOUT} seconds"}
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return result
    return {"error": f"exit status {done.returncode}: {done.stderr[-2000:]}"}


def drawn_cases() -> frozenset[tuple[str, str]]:
    """Returns the (module, case) pairs that pass or differ by chance."""
    with open(KNOWN, "rb") as file:
        entries = tomllib.load(file)["difference"]
    return frozenset((e["module"], case) for e in entries if e.get("drawn") for case in e["cases"])


def problems(name: str, only: str, result: dict[str, Any], known: dict[str, str]) -> list[str]:
    """Returns the problems of one module's result, as lines of text."""
    if "error" in result:
        return [f"{name}: {result['error']}"]
    failures = result["failures"]
    found = [f"{name}: {case} differs and is not listed" for case in failures if case not in known]
    for case in known:
        if only not in case or case in result["left"]:
            continue
        if case not in result["cases"]:
            found.append(f"{name}: {case} is listed, and CPython {VERSION} has no such case")
        elif case not in failures and (name, case) not in drawn_cases():
            found.append(f"{name}: {case} is listed and passes")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="modules, each with an optional :part of the names of its cases")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the tracebacks of all that differ")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        faulthandler.enable()
        sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))
        from tests.cpython.modules import run_module  # only in this process: it skips the package's torch parts

        name, _, only = options.one.partition(":")
        cases, failures, left = run_module(name, only)
        print(f"\n{_MARK}{json.dumps({'cases': cases, 'failures': failures, 'left': left})}")
        return 0
    known = known_differences()
    bad: list[str] = []
    total = passed = 0
    print(f"CPython {VERSION}\n{'module':32}{'methods':>9}{'passed':>9}{'differ':>9}{'percent':>10}")
    for wanted in options.names or modules():
        name, _, only = wanted.partition(":")
        result = in_process_of_its_own(wanted)
        count, differ = len(result.get("cases", ())), len(result.get("failures", ()))
        total, passed = total + count, passed + count - differ
        percent = f"{100 * (count - differ) / count:.1f}" if count else "-"
        print(f"{name:32}{count:9}{count - differ:9}{differ:9}{percent:>10}", flush=True)
        bad += problems(name, only, result, known.get(name, {}))
        if options.verbose:
            for case, trace in result.get("failures", {}).items():
                print(f"--- {case}\n{trace}")
    percent = 100 * passed / total if total else 0.0
    print(f"{'all':32}{total:9}{passed:9}{total - passed:9}{percent:10.1f}")
    if percent < LEAST:
        bad.append(f"{percent:.1f} percent of the cases pass, at least {LEAST} should")
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
