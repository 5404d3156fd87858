"""The commands of runs that results/README.md waits for, from `planned` of results/paper.json.

`planned` names for each results file what it should have. That is either the commands that write
it, or the `command` of benchmarks.controls and its `runs`: for each line the `arms`, their `seeds`,
how many `jobs` run side by side, and what it `takes`. A line names only what the file does not
have, so that a command on a new machine trains nothing that is finished.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# Arms whose runs have another name in the results file; a test compares them with the arms.
METHODS = {"scratch": "from scratch", "uniform-dims": "uniform"}


def commands_of(
    planned: Sequence[str] | Mapping[str, Any], data: Mapping[str, Any] | None, missing: bool
) -> list[str]:
    """The lines for what a results file lacks; `data` is its content, None if there is none.

    `missing` says whether a row lacks all of its runs. Commands that write a whole file are shown
    only then.
    """
    if not isinstance(planned, Mapping):
        return [*planned] if missing else []
    have = {(run["method"], run["seed"]) for run in (data or {}).get("runs", [])}
    lines = []
    for each in planned["runs"]:
        seeds = {
            arm: tuple(s for s in each["seeds"] if (METHODS.get(arm, arm), s) not in have)
            for arm in each["arms"]
        }
        groups = {left: [a for a in seeds if seeds[a] == left] for left in seeds.values() if left}
        for left, arms in groups.items():
            words = [planned["command"], "--arms", *arms, "--seeds", seeds_text(left)]
            words += ["--jobs", str(each["jobs"])] if "jobs" in each else []
            lines += [f"# {each['takes']}", " ".join(words)]
    return lines


def seeds_text(seeds: Sequence[int]) -> str:
    """Seeds as `--seeds` takes them: 54,56-66."""
    parts = list[list[int]]()
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
