"""What a pretrained model loses: compressed here, and by simpler ways, with the same training.

    gaugelasso import SmolLM2-135M-Instruct.Q4_1.gguf --out bases/smol
    python -m benchmarks.smollm2 bases/smol --data train.txt --valid valid.txt --method harm \
        --ratio 1.5 --steps 4000 --out runs/smol-harm-1.5 --results results/smollm2/harm.json

Methods, each with the same tokens, rate, schedule, and distillation from the original:

- harm: channels go by their measured harm while the model trains (`compress.removal = "harm"`)
- stock: the same, with layers that stay alike (`compress.shape = "llama"`)
- pressure: the method as it is for fresh models
- layers: whole layers go first, those that change the stream the least (block influence), then
  the rest is trained
- magnitude: the hidden channels of every MLP with the smallest weights go first, equally many in
  each, then the rest is trained
- torch-pruning: the package Torch-Pruning cuts by the magnitude of groups, first, then the rest is
  trained; --ranking says what it compares
- plain: nothing goes

A row has method, seed, ratio, fma, bytes, bits_per_byte on the first --tokens of the validation
text, tokens and seconds; a row of the same method, ranking, seed, ratio and share of distillation
is replaced. The first row is that of the original. A run that was stopped goes on. --prompts names
a file that gets the most likely continuations of ten prompts, for people to read.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.baselines.torch_pruning_choice import REG, PackageChoice, PrunerOptions
from gaugelasso.compress import pricing, surgery
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.drop import Decision, close_and_round
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.result import TargetMissed
from gaugelasso.config import Config, run_config
from gaugelasso.config.imported import imported_config
from gaugelasso.config.plain import plain
from gaugelasso.files import tokenizer
from gaugelasso.importing.folder import write_model
from gaugelasso.inference import InferenceModel, Sampling, generate
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json
from gaugelasso.tasks import Draw, Tokens
from gaugelasso.training.evaluation import autocast, choose_device, predictor
from gaugelasso.training.trainer import Trainer

METHODS = ("original", "plain", "harm", "stock", "pressure", "layers", "magnitude", "torch-pruning")
# Batches that block influence is measured on.
BATCHES = 8
# Beginnings of texts, half of them of the kind that the models are trained on, and half not.
PROMPTS = (
    "The old man put down his hat and said that",
    "It was late in the evening when the carriage",
    "She opened the letter, and",
    "The river runs through the valley, where",
    "For many years the captain had",
    "The capital of France is",
    "Water boils at",
    "The three most important things when you learn a language are",
    "A computer program consists of",
    "If you add two and three, you get",
)
CONTINUED = 40  # tokens


def fma_of(model: Transformer) -> float:
    return pricing.total_fma(model.axis_table(), pricing.ACCOUNTINGS["fma"], named_tensors(model))


def config_of(given: argparse.Namespace, base: Path, **train: Any) -> Config:
    """The config of a run that begins with the weights of a folder."""
    task = {"name": "tokens", "path": given.data, "valid": given.valid, "length": given.length}
    fixed = {"steps": given.steps, "batch": given.batch, "seed": given.seed}
    sections: dict[str, Any] = {
        "task": task,
        "model": {"from": str(base)},
        "target": {"fma": 1.0},
        "compress": {} if given.lr is None else {"lr": given.lr},
        "train": fixed | {"eval_every": max(1, given.steps // 20), "eval_batches": 4} | train,
    }
    return Config.from_dict(sections)


# --- what goes before the training -----------------------------------------------------------


def cut_to(model: Transformer, target: float, keeps_of: Callable[[int], dict[str, Tensor]]) -> None:
    """Make the fewest drops that bring the work to the target; `keeps_of(n)` makes n of them."""
    state = state_of(model)
    number, decision = 0, decided(state, keeps_of(0))
    while decision is not None and (work := state.work_after(decision)) > target:
        number += 1
        decision = decided(state, keeps_of(number))
        if decision is not None and state.work_after(decision) == work:
            raise SystemExit(f"{target:,.0f} FMA per token cannot be reached: {work:,.0f} are left")
    if decision is None:
        raise SystemExit(f"{target:,.0f} FMA per token cannot be reached")
    cut(model, state, decision)


def state_of(model: Transformer) -> ModelState:
    return Compressor(model, 0.0, CompressorOptions()).state


def cut(model: Transformer, state: ModelState, decision: Decision) -> None:
    staged = surgery.cut(named_tensors(model), state.table, decision.keeps)
    surgery.swap_(model, staged, decision.removed)


def decided(state: ModelState, keeps: dict[str, Tensor]) -> Decision | None:
    rms = {name: torch.ones(len(keep)) for name, keep in keeps.items()}
    return close_and_round(state.table, state.readable(), keeps, rms, 1, {})


def all_kept(model: Transformer) -> dict[str, Tensor]:
    widths = model.axis_table().widths(named_tensors(model))
    return {name: torch.ones(size, dtype=torch.bool) for name, size in widths.items()}


def without_layers(
    model: Transformer, influence: list[float]
) -> Callable[[int], dict[str, Tensor]]:
    """Drops of whole layers, the one of the least influence first."""
    order = sorted(range(len(influence)), key=influence.__getitem__)
    depths = {name: part.depth for name, part in model.operators.items()}
    first = min(depths.values())

    def keeps_of(number: int) -> dict[str, Tensor]:
        gone = set(order[:number])
        owners = {f"operators.{name}" for name, at in depths.items() if at - first in gone}
        keeps = all_kept(model)
        for axis in model.axis_table().axes:
            if axis.owner in owners:
                keeps[axis.name][:] = False
        return keeps

    return keeps_of


@torch.no_grad()
def block_influence(model: Transformer, config: Config, device: str) -> list[float]:
    """1 - the mean cosine of the stream before and after each layer (Men et al. 2024)."""
    depths = sorted({part.depth for part in model.operators.values()})
    totals, streams = torch.zeros(len(depths)), {}

    def before(depth: int) -> Callable[..., None]:
        def keep(module: Any, inputs: Any) -> None:
            streams[depth] = inputs[0].float()

        return keep

    def after(depth: int) -> Callable[..., None]:
        def take(module: Any, inputs: Any, output: Tensor) -> None:
            cosine = torch.cosine_similarity(streams.pop(depth), output.float(), dim=0)
            totals[depths.index(depth)] += 1 - float(cosine.mean())

        return take

    hooks = []
    for depth in depths:
        parts = [part for part in model.operators.values() if part.depth == depth]
        hooks.append(parts[0].register_forward_pre_hook(before(depth)))
        hooks.append(parts[-1].register_forward_hook(after(depth)))
    model.to(device).eval()
    for index in range(BATCHES):
        inputs, _ = config.task.batch(config.train.batch, Draw(config.train.seed, index), device)
        with autocast(config, device):
            model(inputs)
    for hook in hooks:
        hook.remove()
    model.cpu()
    return (totals / BATCHES).tolist()


def by_magnitude(model: Transformer) -> Callable[[int], dict[str, Tensor]]:
    """Drops of hidden channels, equally many in each MLP, those of the smallest weights first."""
    orders = {}
    for axis in model.axis_table().axes:
        if axis.kind == "d_f":
            tensors = named_tensors(model)
            squares: Tensor | int = 0
            for slot in (*axis.side_a, *axis.side_b):
                moved = tensors[slot.tensor].detach().movedim(slot.dim, 0).flatten(1)
                squares = squares + moved.square().sum(1)
            assert isinstance(squares, Tensor)
            orders[axis.name] = squares.argsort()

    def keeps_of(number: int) -> dict[str, Tensor]:
        keeps = all_kept(model)
        for name, order in orders.items():
            keeps[name][order[: 8 * number]] = False
        return keeps

    return keeps_of


def smaller_base(given: argparse.Namespace, target: float, device: str) -> Path:
    """The base, cut to the target, as a folder of its own."""
    folder = given.out.with_name(f"{given.out.name}-base")
    if folder.exists():
        return folder
    model = load_model(given.base)
    assert isinstance(model, Transformer)
    model.set_context_(given.length)
    if given.method == "layers":
        influence = block_influence(model, config_of(given, given.base), device)
        cut_to(model, target, without_layers(model, influence))
    elif given.method == "magnitude":
        cut_to(model, target, by_magnitude(model))
    else:
        state = state_of(model)
        options = PrunerOptions("magnitude", given.ranking, REG)
        cut(model, state, PackageChoice(state, options).to_work(target))
    write_model(model, folder, f"{given.base}, cut", tokenizer.read_files(given.base))
    return folder


# --- runs -------------------------------------------------------------------------------------


def trained(given: argparse.Namespace, target: float, device: str) -> Path:
    """The run of the method."""
    if given.lr is None:  # the default follows the widths, and all methods have that of the whole
        given.lr = config_of(given, given.base).compress.lr
    distilled = {"distill": given.distill}
    if given.method in ("harm", "stock", "pressure"):
        config = config_of(given, given.base, **distilled)
        sections = config.to_dict()
        sections["target"]["fma"] = target
        sections["compress"]["removal"] = "harm" if given.method == "stock" else given.method
        sections["compress"]["shape"] = "llama" if given.method == "stock" else "free"
        config = Config.from_dict(sections)
    else:
        base = given.base if given.method == "plain" else smaller_base(given, target, device)
        if given.method != "plain" and given.distill:
            distilled["teacher"] = str(given.base)
        config = config_of(given, base, **distilled)
        config = plain(config, given.steps, given.steps // 2)
    existing = "resume" if given.out.exists() else "refuse"
    trainer = Trainer(config, given.out, existing)  # type: ignore[arg-type]
    try:
        trainer.run()
    except TargetMissed as error:
        print(error)
    return given.out


def measured(
    model: Transformer, base: Path, given: argparse.Namespace, device: str
) -> dict[str, Any]:
    """Work, bytes and bits per byte of a model."""
    config = imported_config(base, given.valid, given.length, {})
    model = model.to(device)
    figures = config.task.text_figures(predictor(model, config, device), device, given.tokens)
    model.set_context_(given.length)
    return {
        "fma": fma_of(model),
        "parameters": sum(each.numel() for each in model.parameters()),
        "bytes": 2 * sum(each.numel() for each in model.parameters()),
        "bits_per_byte": figures["bits per byte"],
        "loss": figures["loss"],
    }


@torch.inference_mode()
def continuations(model: Transformer, base: Path, device: str) -> list[str]:
    """The prompts, each with what the model says is most likely to follow."""
    reader = Tokens(tokenizer=str(base), vocabulary=model.spec().inputs).reader
    served = InferenceModel(model.to(device).eval())
    starts = [reader.encode([prompt])[0].tolist() for prompt in PROMPTS]
    made = generate(served, starts, CONTINUED, sampling=Sampling(temperature=0.0))
    whole = [[*start, *tokens] for start, tokens in zip(starts, made, strict=True)]
    return [bytes(reader.decode(tokens)).decode(errors="replace") for tokens in whole]


def write_prompts(given: argparse.Namespace, name: str, model: Transformer, device: str) -> None:
    """Add the continuations of a model to the file of all."""
    path: Path = given.prompts
    known = json.loads(path.read_text())["models"] if path.exists() else {}
    known[name] = continuations(model, given.base, device)
    make_folder(path.parent)
    write_json(path, {**environment(device), "prompts": list(PROMPTS), "models": known})


def write_row(given: argparse.Namespace, row: dict[str, Any], device: str) -> None:
    """Add a row to the results, in place of one of the same settings."""
    path: Path = given.results
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    same = ("method", "seed", "ratio", "ranking", "distill")
    rows = [old for old in rows if any(old.get(key) != row.get(key) for key in same)]
    make_folder(path.parent)
    write_json(path, {**environment(device), "rows": [*rows, row]})
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("base", type=Path, help="folder that gaugelasso import wrote")
    parser.add_argument("--data", required=True, help="text to train on")
    parser.add_argument("--valid", required=True, help="text to measure on")
    parser.add_argument("--method", required=True, choices=METHODS)
    parser.add_argument("--ratio", type=float, default=1.5, help="how many times less work")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--distill", type=float, default=0.5)
    parser.add_argument("--ranking", choices=["global", "isomorphic", "local"], default="local")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--tokens", type=int, default=300_000, help="measured tokens; 0: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="file of continuations, to be added to")
    given = parser.parse_args()
    device, began = choose_device(given.device), time.perf_counter()
    original = load_model(given.base)
    assert isinstance(original, Transformer)
    original.set_context_(given.length)
    row: dict[str, Any] = {"method": given.method, "seed": given.seed, "ratio": given.ratio}
    if given.method == "original":
        row |= {"seed": 0, "ratio": 1.0, "tokens": 0, "seconds": 0.0}
        write_row(given, row | measured(original, given.base, given, device), device)
        if given.prompts:
            write_prompts(given, "original", original, device)
        return
    if given.out is None:
        parser.error(f"--method {given.method} needs --out")
    if given.method == "plain":
        row["ratio"] = 1.0
    run = trained(given, fma_of(original) / given.ratio, device)
    tokens = given.steps * given.batch * given.length
    row |= {"tokens": tokens, "seconds": time.perf_counter() - began}
    if given.method == "torch-pruning":
        row["ranking"] = given.ranking
    settings = run_config(run)
    row |= {"lr": settings.compress.lr, "distill": settings.train.distill}
    found = load_model(run)
    assert isinstance(found, Transformer)
    write_row(given, row | measured(found, given.base, given, device), device)
    if given.prompts:
        write_prompts(given, f"{given.method}, {row['ratio']:g} times less", found, device)


if __name__ == "__main__":
    main()
