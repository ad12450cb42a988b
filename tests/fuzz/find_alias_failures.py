"""Runs random programs over views and shows all that differ, grouped by the difference, each shortened.

python -m tests.fuzz.find_alias_failures FIRST COUNT [--whole]
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import time

from tests.fuzz.alias_programs import generate
from tests.fuzz.alias_run import check
from tests.fuzz.compare import Differs
from tests.fuzz.run import Outcome
from tests.fuzz.shrink import shrink


def _outcome(source: str) -> tuple[Outcome | None, str]:
    """Returns the outcome of a program, or the difference in it."""
    try:
        return check(source), ""
    except Differs as error:
        return None, str(error)
    except Exception as error:  # a program whose comparison itself fails
        return None, f"broken, {type(error).__name__}: {error}"


def _differs(source: str) -> bool:
    return _outcome(source)[1].partition(",")[0] not in ("", "broken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--whole", action="store_true", help="do not shorten")
    options = parser.parse_args()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    began, groups, captured, refused = time.time(), dict[str, list[tuple[int, str, str]]](), 0, dict[str, int]()
    for seed in range(options.first, options.first + options.count):
        source = generate(random.Random(seed).randrange)
        outcome, said = _outcome(source)
        if outcome is None:  # outside the handler: programs that raise would see its exception
            shorter = source if options.whole else shrink(source, _differs, most=120)
            said = _outcome(shorter)[1] or said
            kind = re.sub(r"\d+|\[.*?\]", "#", said)[:60]
            groups.setdefault(kind, []).append((seed, said, shorter))
            continue
        captured += outcome.replays > 0
        for reason in set(outcome.reasons):
            text = re.sub(r"\d+|argument \S+|<\w+>", "#", reason)[:90] if outcome.replays == 0 else ""
            refused[text] = refused.get(text, 0) + 1
    for kind, found in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"\n######## {len(found)} programs: {kind}   seeds {[seed for seed, *_ in found]}")
        for seed, said, source in sorted(found, key=lambda item: len(item[2]))[:3]:
            print(f"--- seed {seed}: {said[:400]}\n{source.split('def build', 1)[1]}")
    wrong = sum(map(len, groups.values()))
    print(f"\n{options.count} programs, {captured} captured, {wrong} differ, {time.time() - began:.0f} s")
    for reason, count in sorted(refused.items(), key=lambda item: -item[1])[:25]:
        print(f"{count:5} {reason}")


if __name__ == "__main__":
    main()
