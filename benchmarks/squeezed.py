"""How much smaller do the runs of benchmarks.promise become at their own loss?

    python benchmarks/promise.py --out runs/promise --results results/promise
    python -m benchmarks.squeezed runs/promise/*-42 --results results/promise/squeezed.json

Squeezes each run (`gaugelasso squeeze`) and writes one row for it. Tries that are finished are not
trained again, so the command goes on where it was stopped. The file keeps the rows of other runs,
and its commands.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.kept_rows import write_beside
from benchmarks.promise import command


def row_of(run: Path) -> dict[str, Any]:
    """The run and the smallest model that keeps its loss, from their files."""
    result = json.loads((run / "squeezed" / "squeeze.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    first, *tries = result["rows"]
    best = next(row for row in result["rows"] if row["folder"] == result["smallest"])
    where = json.loads((run / "environment.json").read_text())
    return {
        "commit": where["commit"],
        "task": summary["task"],
        "named_loss": summary["loss_target"],
        "seed": summary["seed"],
        "fma_initial": summary["fma_initial"],
        **{key: first[key] for key in ("selection_loss", "loss", "metric")},
        "fma": first["work"],
        "squeezed": {
            **{key: best[key] for key in ("selection_loss", "loss", "metric")},
            "fma": best["work"],
        },
        "tries": [
            {"fma": row["work"], "selection_loss": row["selection_loss"], "held": row["held"]}
            for row in tries
        ],
        # Of all tries, over that of the run.
        "training_work": result["training_fma"] / first["training_fma"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    rows = []
    for run in given.runs:
        done = command("squeeze", str(run.absolute()), "--jobs", str(given.jobs))
        if done.returncode:
            raise SystemExit(f"{run}: {done.stderr[-2000:]}")
        rows.append(row_of(run))
        best = rows[-1]["squeezed"]
        print(f"{run.name}: {rows[-1]['fma']:,.0f} FMA to {best['fma']:,.0f}, {best['loss']:.4g}")
        write_beside(given.results, rows, ("task", "named_loss", "seed"))


if __name__ == "__main__":
    main()
