"""What a pretrained model loses in small: ways to make its channels go, on a CPU.

    python -m benchmarks.stand_in train base-0.pt --data train.txt --valid valid.txt --seed 0
    python -m benchmarks.stand_in compress base-0.pt --data train.txt --valid valid.txt \
        --method harm --ratio 2 --results results/stand_in.json

`train` makes the stand-in: a character model of 74,304 FMA per token, trained by AdamW until its
loss is nearly flat, on all of the text but its last --held-back bytes. `compress` goes on from it
to a named work per token, on the last --text bytes alone. Methods:

- plain: nothing goes
- harm: channels go by their measured harm, the default for pretrained weights
- pressure: the method for fresh weights. The course bounds the pressed loss by a share of the way
  back to the first loss, which is that of a fresh model here
- pressure-as-built: the same, with the first loss of the pretrained model
- decoupled: the penalty as a step of its own, with the strength of `pressure`
- proximal: after the task's step the RMS of each group is reduced by lr rho times its price, down
  to zero. The strength rho follows the work: it grows while that is behind its
  schedule, and falls while it is ahead
- vectors: `pressure` on gains and scales alone
- gates: every channel has a gain of its own, 1 at first, which is multiplied into one side. Its
  gradient step is followed by a reduction by rho times its price, with the strength of `proximal`

--fresh-gauge first rescales the model, without a change of its outputs, until the sides of each
axis have the ratio, and the gains the RMS, of a fresh model. --share is that of distillation from
the original.

A row has the loss on the first --windows windows of the validation text, and the standard error of
its difference to the original's; `training_loss` is that on a quarter as many windows of the
text that was trained on.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.stand_in_ways import Gates, Proximal, Vectors, course_of, fresh_gauge_
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.axes import named_tensors
from gaugelasso.compress import pricing
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.stages import default_warmup
from gaugelasso.compress.courses.work import REACHED
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.importing.pretrained import for_pretrained
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json
from gaugelasso.tasks import CharLM, Draw

LENGTH, TRAINED_BATCH, BATCH = 64, 16, 8
SPEC = TransformerSpec.uniform(
    width=48, layers=2, heads=4, d_k=12, d_v=12, d_f=128, length=LENGTH, inputs=256, outputs=256
)
FRESH_LOSS = math.log(256)
PEAK = 3e-3  # the rate of the stand-in
# Of a row, the options as they were given.
SETTINGS = ("method", "seed", "ratio", "share", "fresh_gauge", "text", "steps", "windows")
Text = np.ndarray[Any, Any]


def fma_of(model: Transformer) -> float:
    return pricing.total_fma(model.axis_table(), pricing.ACCOUNTINGS["fma"], named_tensors(model))


def task_of(given: argparse.Namespace, part: slice) -> CharLM:
    """The task on a part of the text, which is written beside the stand-in."""
    text = Path(given.data).read_bytes()[part]
    path = given.base.with_name(f"text-{part.start or 0}-{part.stop or 0}")
    if not path.exists():
        path.write_bytes(text)
    return CharLM(path=str(path), valid=given.valid, length=LENGTH)


def train(given: argparse.Namespace) -> None:
    """Train the stand-in and save it."""
    task, model = task_of(given, slice(0, -given.held_back)), Transformer(SPEC, given.seed)
    optimizer = torch.optim.AdamW(model.parameters(), PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = default_warmup(given.steps)
    for step in range(given.steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / given.steps))
        rate = PEAK * min((step + 1) / warmup, 0.05 + 0.95 * cosine)
        optimizer.param_groups[0]["lr"] = rate
        inputs, targets = task.batch(TRAINED_BATCH, Draw(given.seed, step), "cpu")
        loss = task.loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 500 == 499:
            held_out = window_losses(model, text_of(given.valid), 256).mean()
            print(f"step {step + 1}: {float(loss.detach()):.4f}, held out {held_out:.4f}")
    torch.save(model.state_dict(), given.base)


def text_of(path: str) -> Text:
    return np.frombuffer(Path(path).read_bytes(), np.uint8)


@torch.no_grad()
def window_losses(model: Transformer, text: Text, windows: int) -> Text:
    """The mean loss of each of the first windows of a text."""
    model.eval()
    at = LENGTH * np.arange(windows)[:, None] + np.arange(LENGTH + 1)
    rows = torch.from_numpy(text[at].astype(np.int64))
    parts = []
    for block in rows.split(64):
        logits = model(block[:, :-1]).flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, block[:, 1:].flatten(), reduction="none")
        parts.append(losses.view(len(block), LENGTH).mean(1))
    model.train()
    return torch.cat(parts).numpy()


def loaded(path: Path) -> Transformer:
    """The stand-in, with the structure of pretrained weights."""
    model = Transformer(for_pretrained(SPEC))
    model.load_state_dict(torch.load(path))
    return model


def compressor_of(model: Transformer, given: argparse.Namespace) -> Compressor:
    """The compressor of a method."""
    method, own = given.method, given.method in ("proximal", "gates")
    options = CompressorOptions(
        lr=given.lr,
        removal="harm" if method == "harm" else "pressure",
        coupling="decoupled" if method == "decoupled" else "coupled",
        solver="fixed" if own or method == "plain" else "conservative",
        rho=1.0 if own else 0.0,
        split_share=0.0 if method == "gates" else CompressorOptions.split_share,
    )
    target = fma_of(model) / given.ratio
    compressor = Compressor(model, options=options, steps=given.steps, fma_target=target)
    course = course_of(compressor)
    course.descent_at = course.warmup  # of pretrained weights
    if method == "plain":
        course.ends_at = round(REACHED * given.steps)
    elif method not in ("harm", "pressure-as-built"):
        course.first_loss = FRESH_LOSS
    if own:
        compressor.device_step = (Proximal if method == "proximal" else Gates)(compressor)
    elif method == "vectors":
        compressor.device_step = Vectors(
            compressor.state, compressor.scalars, compressor.options.relative_step
        )
    return compressor


def minimised(
    model: Transformer, teacher: Transformer | None, share: float, pair: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    """The loss of a batch: that of the text, and `share` of the distance to the teacher."""
    inputs, targets = pair
    wanted = None
    if teacher is not None:
        with torch.no_grad():
            wanted = teacher(inputs)

    def loss() -> Tensor:
        outputs = model(inputs)
        loss = kernels.cross_entropy(outputs, targets)
        if wanted is None:
            return loss
        return loss.lerp(kernels.soft_cross_entropy(outputs, wanted), share)

    return loss


def compress(given: argparse.Namespace) -> None:
    """Compress the stand-in and write a row."""
    began, text = time.perf_counter(), text_of(given.valid)
    original, model = loaded(given.base), loaded(given.base)
    before = window_losses(original, text, given.windows)
    if given.fresh_gauge:
        fresh_gauge_(model, Transformer(SPEC))
        few = min(given.windows, 64)
        assert np.abs(window_losses(model, text, few) - before[:few]).max() < 1e-3
    task = task_of(given, slice(-given.text, None))
    teacher = original.eval() if given.share else None
    compressor = compressor_of(model, given)
    for step in range(given.steps):
        pair = task.batch(BATCH, Draw(given.seed, step), "cpu")
        loss_of = minimised(model, teacher, given.share, pair)
        if given.method == "gates":  # cuts nothing but zeros, and no cut may be undone
            loss = loss_of()
            loss.backward()
            compressor.step(loss)
        else:
            compressor.step(loss_of)
        if given.verbose and step % 50 == 49:
            strength = getattr(compressor.device_step, "strength", "")
            print(step + 1, f"{compressor.fma:.0f} {course_of(compressor).loss:.4f}", strength)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a work that is not reached
        compressor.finish()
    losses, seen = window_losses(model, text, given.windows), text_of(task.path)
    some = min(given.windows // 4, len(seen) // LENGTH - 1)
    row = {key: getattr(given, key) for key in SETTINGS} | {
        "base": given.base.stem,
        "lr": compressor.options.lr,
        "fma": compressor.fma,
        "fma_original": compressor.fma_initial,
        "loss": float(losses.mean()),
        "loss_original": float(before.mean()),
        "standard_error": float((losses - before).std() / math.sqrt(len(losses))),
        "training_loss": float(window_losses(model, seen, some).mean()),
        "seconds": time.perf_counter() - began,
    }
    path: Path = given.results
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    make_folder(path.parent)
    write_json(path, {**environment("cpu"), "rows": [*rows, row]})
    print(json.dumps(row))


METHODS = (
    "plain",
    "harm",
    "pressure",
    "pressure-as-built",
    "decoupled",
    "proximal",
    "vectors",
    "gates",
)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    for name, run, steps in (("train", train, 3000), ("compress", compress, 400)):
        each = commands.add_parser(name)
        each.set_defaults(run=run)
        each.add_argument("base", type=Path, help="file of the stand-in's weights")
        each.add_argument("--data", required=True, help="text to train on")
        each.add_argument("--valid", required=True, help="text to measure on")
        each.add_argument("--seed", type=int, default=0)
        each.add_argument("--steps", type=int, default=steps)
        if name == "train":
            each.add_argument("--held-back", type=int, default=5_000_000)
            continue
        each.add_argument("--text", type=int, default=5_000_000, help="bytes to train on")
        each.add_argument("--method", required=True, choices=METHODS)
        each.add_argument("--ratio", type=float, default=2.0, help="how many times less work")
        each.add_argument("--lr", type=float)
        each.add_argument("--share", type=float, default=0.5, help="of distillation")
        each.add_argument("--fresh-gauge", action="store_true")
        each.add_argument("--windows", type=int, default=1024)
        each.add_argument("--verbose", action="store_true")
        each.add_argument("--results", type=Path, required=True)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    given.run(given)


if __name__ == "__main__":
    main()
