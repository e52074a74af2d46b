"""`python -m simulation --seeds 10000`: run seeds, print each that breaks a promise as a small readable trace."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import ExitStack

from simulation.broken import BROKEN
from simulation.shrink import run_seed, shrunk
from simulation.simulation import Result


def main() -> int:
    """The exit code: 0 if every promise held, 1 if one was broken, 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many runs (default 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, metavar="N", help="this run alone, with its trace")
    parser.add_argument("--broken", metavar="NAME", nargs="+", default=[], help="without a rule of --list, or `all`")
    parser.add_argument("--list", action="store_true", help="name the rules that --broken removes")
    parser.add_argument("--trace", action="store_true", help="print every run, not only what fails")
    parser.add_argument("--raw", action="store_true", help="do not shrink what fails")
    asked = parser.parse_args()
    if asked.list:
        for name, entry in BROKEN.items():
            sys.stdout.write(f"{name:40} {entry.rule}\n")
        return 0
    broken = " ".join(asked.broken) or None
    if broken not in (None, "all", *BROKEN):
        parser.error(f"no such rule: {broken!r}; see --list")
    if broken == "all":
        return _every_rule(asked.first, asked.seeds)
    seeds = range(asked.first, asked.first + asked.seeds) if asked.seed is None else [asked.seed]
    with ExitStack() as stack:
        if broken is not None:
            stack.enter_context(BROKEN[broken].removed())
        return _seeds(seeds, tell=asked.trace or asked.seed is not None, raw=asked.raw, broken=broken)


def _seeds(seeds: range | list[int], *, tell: bool, raw: bool, broken: str | None) -> int:
    began, failed, seen, events = time.monotonic(), 0, Counter[str](), 0
    for seed in seeds:
        result = run_seed(seed, BROKEN[broken].focus if broken is not None else None)
        seen.update(result.seen)
        events += result.events
        if result.failure is not None:
            failed += 1
            _tell(seed, result if raw else shrunk(result), broken)
            if broken is not None or failed == 3:
                break
        elif tell:
            _tell(seed, result, broken)
    if not tell:
        took = time.monotonic() - began
        sys.stdout.write(f"{len(seeds)} seeds, {events} events, {took:.1f} s; failed: {failed}\n")
        sys.stdout.write("; ".join(f"{what} {count}" for what, count in sorted(seen.items())) + "\n")
    return 1 if failed else 0


def _tell(seed: int, result: Result, broken: str | None) -> None:
    out = sys.stdout
    again = f"python -m simulation --seed {seed}" + (f" --broken {broken}" if broken else "")
    out.write(f"\n{again}\n")
    for line in result.plan.lines():
        out.write(f"  {line}\n")
    for line in result.trace:
        out.write(f"  {line}\n")
    out.write(f"  => {result.failure if result.failure is not None else 'every promise held'}\n\n")


def _every_rule(first: int, seeds: int) -> int:
    missed = 0
    for name, entry in BROKEN.items():
        caught = entry.caught(range(first, first + seeds))
        missed += caught is None
        found = f"seed {caught[0]}: {caught[1]}" if caught is not None else "NOT CAUGHT"
        sys.stdout.write(f"{name:40} {found}\n")
        sys.stdout.flush()
    return 1 if missed else 0


sys.exit(main())
