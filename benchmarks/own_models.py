"""Do models that are not transformers stay finite, also where nothing removable is left?

    python benchmarks/own_models.py --results results/own_models.json --jobs 2

The perceptron of examples/your_model.py and the network of examples/residual_relu.py, 20 seeds of
3,000 steps each: at a loss target that four units can hold, and at one that is always met, where
everything that may go goes. After every step all weights and all optimizer state are checked.
"""

import argparse
import importlib.util
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gaugelasso import Compressible, Compressor, CompressorOptions
from gaugelasso.runs.environment import environment

ROOT = Path(__file__).parents[1]
SEEDS, STEPS = range(20), 3000
# Three output values of variance about 4: a target of 100 is met by a model that does nothing.
TARGETS = (0.5, 100.0)


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(kind: str) -> Compressible:
    if kind == "perceptron":
        return example("your_model").Perceptron(8, 64, 3)
    return example("residual_relu").build()


def run(job: tuple[str, float, int]) -> dict[str, Any]:
    """Fit a random perceptron of four units on fresh batches."""
    kind, target, seed = job
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    teacher = example("your_model").Perceptron(8, 4, 3).requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    torch.manual_seed(seed)
    model = model_of(kind)
    compressor = Compressor(model, target, CompressorOptions(lr=3e-3, interval=25))
    units = sum(compressor.widths.values())
    losses, not_finite = [], None
    for step in range(STEPS):
        x = torch.randn(256, 8, generator=generator)
        loss = F.mse_loss(model(x), teacher(x))
        loss.backward()
        compressor.step(loss)
        losses.append(loss.item())
        if not compressor.resume_state.finite():
            not_finite = step + 1
            break
    return {
        "model": kind,
        "loss_target": target,
        "seed": seed,
        "steps": len(losses),
        "first_step_not_finite": not_finite,
        "skipped_steps": int(compressor.skipped),
        "units_initial": units,
        "units": sum(compressor.widths.values()),
        "loss": sum(losses[-50:]) / len(losses[-50:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    kinds = ("perceptron", "residual ReLU")
    jobs = [(kind, target, seed) for kind in kinds for target in TARGETS for seed in SEEDS]
    ran_on = environment("cpu")  # before the runs: the checkout may change meanwhile
    with ProcessPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(run, jobs))
    command = f"python benchmarks/own_models.py --results {given.results} --jobs {given.jobs}"
    report = {"command": command, "environment": ran_on, "rows": rows}
    given.results.write_text(json.dumps(report, indent=1) + "\n")
    failed = [row for row in rows if row["first_step_not_finite"] or row["skipped_steps"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} runs without a value that is not finite")
    for kind in kinds:
        for target in TARGETS:
            units = [r["units"] for r in rows if (r["model"], r["loss_target"]) == (kind, target)]
            print(f"{kind}, target {target:g}: {min(units)} to {max(units)} units left")


if __name__ == "__main__":
    main()
