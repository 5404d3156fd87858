"""Does the README's loop, word for word, hold the loss that it names? Sorting, five seeds.

    python benchmarks/readme_loop.py --results results/promise/readme_loop.json

The loop has no held-out data, so its result is about the last training batches. Here the final
model is measured on 100 batches that it has not seen.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import write_json

ROOT = Path(__file__).parents[1]
HELD_OUT = 100


def run(code: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    model, result = names["model"].eval(), names["result"]
    losses, right, sequences = [], 0, 0
    with torch.inference_mode():
        for inputs, targets in names["batches"](HELD_OUT):
            outputs = model(inputs)
            losses.append(F.cross_entropy(outputs.flatten(0, 1), targets.flatten()).item())
            wrong = (outputs.argmax(2) != targets) & (targets >= 0)
            right, sequences = right + int((~wrong.any(1)).sum()), sequences + len(inputs)
    return {
        "task": "sorting, the README's loop",
        "seed": seed,
        "named_loss": result.loss_target,
        "final_loss": sum(losses) / HELD_OUT,
        "training_loss": result.loss,
        "held": result.held,
        "fma_initial": result.fma_initial,
        "fma": result.fma,
        "metric": {"name": "exact match", "value": right / sequences},
        "steps": result.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    rows = [run(code, seed) for seed in range(42, 47)]
    for each in rows:
        print(each)
    about = environment("cpu")
    write_json(given.results, {**about, "rows": rows})


if __name__ == "__main__":
    main()
