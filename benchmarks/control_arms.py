"""What benchmarks.controls trains: the arms of each task of the paper.

An arm is one way to get a model. Rivals get the work per token that compression reached in
results/, and the arms of equal training work get that of the runs there.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gaugelasso.baselines.cofi import parameters
from gaugelasso.baselines.ladder import Scale
from gaugelasso.config import load_config
from gaugelasso.models import Transformer, TransformerSpec

ROOT = Path(__file__).parents[1]
# No pressure, and any loss will do.
PLAIN = ("compress.solver=fixed", "compress.rho=0", "target.hold=pressed", "target.loss=1e30")
# The weights of distillation in the code of CoFi's authors, which leaves out the task's loss.
COFI_LAYERS = ("--distill", "1", "--layer-distill", "9")
# Pixels of a face of 128 x 128: one patch.
SHIFT = ("task.shift=8",)


@dataclass(frozen=True)
class Arm:
    """A command of the package. `source` is the arm whose run it starts from.

    `method` is its name in the results file, if that is another: the one of `gaugelasso compare`.
    `structure`: its row has the widths of each layer, which a table shows. `found` is a results
    file and a seed: the run begins with the structure of that one, and new weights.
    """

    command: str
    config: str = ""
    source: str = ""
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    method: str = ""
    structure: bool = False
    found: tuple[str, int] | None = None


@dataclass(frozen=True)
class Work:
    """A task and its arms. `fma` is the work that rivals and uniform models are asked for."""

    arms: Mapping[str, Arm]
    fma: float = 0.0
    uniform: Mapping[str, Scale] = field(default_factory=dict)

    def method(self, name: str) -> str:
        """The name of an arm in the results file."""
        return self.arms[name].method or name

    @property
    def about(self) -> dict[str, Any]:
        """What all runs of a folder and all rows of a file have together."""
        task = load_config(ROOT / next(arm.config for arm in self.arms.values())).task_name
        return {"task": task, "fma_asked": round(self.fma) or None}

    def origin(self, name: str, seed: int) -> tuple[str, int] | None:
        """The arm and seed of the run that this one starts from."""
        source = self.arms[name].source
        return (source, seed) if source else None


def results_of(name: str) -> list[dict[str, Any]]:
    """The runs of a results file."""
    runs: list[dict[str, Any]] = json.loads((ROOT / "results" / name).read_text())["runs"]
    return runs


def mean_work(name: str) -> float:
    return statistics.mean(run["fma_final"] for run in results_of(name))


def stretched(name: str, budget: float) -> tuple[str, ...]:
    """Settings with which a model of constant work trains for `budget` FMA in all.

    A step counts as the work per token. The anneal has the same share of the steps as in the run
    of the results file, which ended when its targets were met; this one ends with its steps.
    """
    run = results_of(name)[0]
    steps = int(budget / run["fma_final"])
    anneal = (run["steps"] - run["before_cooldown"]["step"]) / run["steps"]
    length = (f"train.steps={steps}", f"train.cooldown={round(anneal * steps)}")
    return ("target.fma=0", "train.saturation=0", *length)


def shortened(name: str, budget: float) -> tuple[str, ...]:
    """Settings with which a compressed run trains for about `budget` FMA in all.

    An estimate: the steps before the anneal are taken to cost what they cost in the run of the
    results file, and the anneal gets the rest, at the final work per token. How long compression
    takes is not known beforehand, so the work that a run counts in the end differs from `budget`.
    """
    run = results_of(name)[0]
    anneal = run["steps"] - run["before_cooldown"]["step"]
    pressed = run["training_fma"] - anneal * run["fma_final"]
    left = int((budget - pressed) / run["fma_final"])
    if left < 1:
        raise ValueError(f"{name}: compression alone took {pressed:.3g} FMA of {budget:.3g}")
    return (f"train.saturation={left}",)


def from_scratch(config: str, name: str, seed: int) -> Arm:
    """The structure of a run of a results file, with its steps and anneal, without pressure."""
    run = run_of(name, seed)
    anneal = run["steps"] - run["before_cooldown"]["step"]
    length = (f"train.steps={run['steps']}", f"train.cooldown={anneal}", "train.saturation=0")
    settings = (*PLAIN, "target.fma=0", *length)
    return Arm("train", config, settings=settings, method="from scratch", found=(name, seed))


def run_of(name: str, seed: int) -> dict[str, Any]:
    return next(run for run in results_of(name) if run["seed"] == seed)


def parameters_of(name: str, seed: int) -> float:
    """The parameters of the structure that a run ended with, without the embedding."""
    spec = TransformerSpec.from_dict(run_of(name, seed)["structure"])
    return parameters(Transformer(spec))


def retrieval(fma: float | None) -> Work:
    config = "configs/retrieval/paper.toml"
    fma = fma or mean_work("retrieval/population.json")
    to = ("--fma", f"{fma:.0f}")
    # As many steps after the full model as compression has in all.
    longer = (*to, "--finetune", "29000")
    exchange = ("compress.exchange=500",)
    # With a tied norm balance changes the outputs and would be undone; the paper bounds no event.
    tied = ("model.norm=tied", "compress.drop_tolerance=1000")
    return Work(
        {
            "compression": Arm("train", config),
            "exchange": Arm("train", config, settings=exchange),
            "tied-unbounded": Arm("train", config, settings=tied),
            "tied-unbounded-exchange": Arm("train", config, settings=exchange + tied),
            "full": Arm("train", config, settings=PLAIN),
            "uniform-dims": Arm("train", config, settings=PLAIN, method="uniform"),
            "uniform-heads": Arm("train", config, settings=PLAIN),
            "scratch": from_scratch(config, "retrieval/population.json", 45),
            "post-hoc": Arm("prune", source="full", options=to),
            "post-hoc-long": Arm("prune", source="full", options=longer),
            "cofi": Arm("cofi", source="full", options=to),
            "cofi-unbounded": Arm("cofi", source="full", options=(*to, "--mask-bound", "0")),
            "cofi-layers": Arm("cofi", source="full", options=(*to, *COFI_LAYERS)),
            "torch-pruning-magnitude": Arm("torch-pruning", source="full", options=to),
            "torch-pruning-magnitude-long": Arm("torch-pruning", source="full", options=longer),
            "torch-pruning-isomorphic-long": Arm(
                "torch-pruning", source="full", options=(*longer, "--ranking", "isomorphic")
            ),
            "torch-pruning-group-norm": Arm(
                "torch-pruning", source="full", options=(*to, "--mode", "group-norm")
            ),
        },
        fma=fma,
        uniform={"uniform-dims": "dims", "uniform-heads": "heads"},
    )


def division(_: float | None) -> Work:
    """Rivals are pruned to a loss, as in the paper, not to a work per token."""
    config = "configs/ff31/paper.toml"
    # As in the paper: 30,000 steps and an anneal of 10,000, then a ceiling of the loss. Where the
    # paper removes one channel a round, this removes 20, or the rounds would take hours.
    full = (*PLAIN, "train.steps=40000", "train.cooldown=10000")
    ceiling = ("--loss", "0.1", "--channels", "20", "--corrective", "10", "--finetune", "10000")
    return Work(
        {
            "compression": Arm("train", config),
            "compression-slow": Arm("train", "configs/ff31/slow.toml"),
            "compression-loose": Arm("train", "configs/ff31/loose.toml"),
            "full": Arm("train", config, settings=full),
            "scratch": from_scratch(config, "ff31/population.json", 43),
            "post-hoc": Arm("prune", source="full", options=ceiling),
        },
    )


def charlm(fma: float | None) -> Work:
    config, uniform = "configs/charlm/main.toml", "configs/charlm/uniform.toml"
    fma = fma or 7.6e6
    to = ("--fma", f"{fma:.0f}")
    # As in the paper: 10,000 steps of the full model, and 47,000 in all.
    full = (*PLAIN, "target.fma=0", "train.steps=10000", "train.cooldown=9500")
    full = (*full, "train.saturation=0")
    tuned = ("--finetune", "36000")
    # The same steps in all, some of them with regularisation.
    sparse = ("--mode", "group-norm", "--sparse", "10000", "--finetune", "26000")
    # The paper's schedule, and its second target: the parameters of the compressed model.
    masks = ("--warmup", "5000", "--prune", "40000", "--finetune", "25000")
    few = ("--parameters", f"{parameters_of('charlm/main.json', 42):.0f}")
    pressed, plain = (results_of(f"charlm/{name}.json")[0] for name in ("main", "uniform"))
    # At the loss of main.toml compression alone takes more work than the whole uniform run. At the
    # looser ln 3 it leaves some for an anneal.
    short = shortened("charlm/main-ln3.json", plain["training_fma"])
    long = stretched("charlm/uniform.json", pressed["training_fma"])
    scratch = from_scratch(config, "charlm/main.json", 42)
    # The rates at which the uniform model does better.
    fast = (*scratch.settings, "compress.lr=1e-3", "train.lr_min=1e-4")
    return Work(
        {
            "compression": Arm("train", config),
            "uniform": Arm("train", uniform),
            "compression-short": Arm("train", "configs/charlm/ln3.toml", settings=short),
            "uniform-long": Arm("train", uniform, settings=long),
            "deep": Arm("train", "configs/charlm/deep.toml", structure=True),
            "loose": Arm("train", "configs/charlm/loose.toml"),
            "full": Arm("train", config, settings=full),
            "scratch": scratch,
            "scratch-fast": replace(scratch, settings=fast, method=""),
            "post-hoc": Arm("prune", source="full", options=(*to, *tuned)),
            "cofi": Arm("cofi", source="full", options=(*to, *masks)),
            "cofi-parameters": Arm("cofi", source="full", options=(*few, *masks)),
            "torch-pruning-magnitude": Arm("torch-pruning", source="full", options=(*to, *tuned)),
            "torch-pruning-isomorphic": Arm(
                "torch-pruning", source="full", options=(*to, *tuned, "--ranking", "isomorphic")
            ),
            "torch-pruning-group-norm": Arm("torch-pruning", source="full", options=(*to, *sparse)),
        },
        fma=fma,
    )


def faces(_: float | None) -> Work:
    """The images are given with `--set task.path=data/faces.npz`.

    All arms mirror half of the training images, as the task does by default. Those that are shifted
    also move them, compression and uniform alike.
    """
    config, uniform = "configs/mae/main.toml", "configs/mae/uniform.toml"
    return Work(
        {
            "compression": Arm("train", config),
            "uniform": Arm("train", uniform),
            "compression-shifted": Arm("train", config, settings=SHIFT),
            "uniform-shifted": Arm("train", uniform, settings=SHIFT),
            "loose": Arm("train", "configs/mae/loose.toml"),
            "wide": Arm("train", "configs/mae/wide.toml"),
        },
    )


TASKS = {"retrieval": retrieval, "division": division, "charlm": charlm, "faces": faces}
