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
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.axes import Tensors, named_tensors
from gaugelasso.compress import pricing, reference
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.stages import default_warmup
from gaugelasso.compress.courses.work import REACHED, WorkCourse
from gaugelasso.compress.device_step import DeviceStep
from gaugelasso.compress.drop import Decision
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
# The strength of `proximal` and `gates` changes by at most this factor in a step, where the work
# is this much off its schedule, on a logarithmic scale.
STRENGTH_RATE, OFF = 0.01, 0.2
# The first strength of `proximal`: a group of a typical price loses this share of the rate a step.
GENTLE = 0.05
# The strength of `gates` is at first that of a model in which all work is worth this share of the
# loss; their rate is such that a gate nothing opposes is closed at the end of the descent.
WORTH = 0.2


# --- methods ----------------------------------------------------------------------------------


class OwnStrength(DeviceStep):
    """A step without a penalty, and then `shrink_`, with a strength that follows the work."""

    def __init__(self, compressor: Compressor):
        options = compressor.options
        super().__init__(compressor.state, compressor.scalars, options.relative_step)
        self._compressor = compressor
        self.strength: float | None = None
        self.typical: float | None = None  # price

    @property
    def course(self) -> WorkCourse:
        return course_of(self._compressor)

    @torch.no_grad()
    def update_(self, loss: Tensor) -> Tensor:
        plan, scalars, optimizer = self._state.plan, self._scalars, self._state.optimizer
        loss = plan.means.finish_(loss)
        sound = scalars.check_finite_(loss, plan.store.grad)
        optimizer.observe_(sound)
        # The solver is fixed at 1, so rho is 1 at steps with pressure, and 0 at others.
        lr, norm_rate = scalars.solve_rho_(self._unit, self._unit, sound)
        rates = self._rates(plan.penalty.norms(plan.store.weight), lr)
        optimizer.step_(optimizer.momentum, self._nothing, lr, rates)
        if bool(scalars.rho):
            if self.strength is None:
                self.strength = self.first_strength()
            off = min(max(self.course.behind / OFF, -1.0), 1.0)
            self.strength *= math.exp(STRENGTH_RATE * off)
            self.shrink_(float(lr), self.strength)
        plan.slow.follow_(norm_rate)
        return loss

    def first_strength(self) -> float:
        raise NotImplementedError

    def shrink_(self, lr: float, strength: float) -> None:
        raise NotImplementedError


class Proximal(OwnStrength):
    """RMS(T) <- max(0, RMS(T) - lr rho r / (a typical r)) of every group.

    By the penalty's own weights, r / sqrt(n) of the norm, sides of one element would be gone long
    before those of many.
    """

    def first_strength(self) -> float:
        return GENTLE

    def shrink_(self, lr: float, strength: float) -> None:
        plan = self._state.plan
        penalty, weight = plan.penalty, plan.store.weight
        if self.typical is None:
            self.typical = float(np.median(np.concatenate([*plan.prices.values()])))
        price = penalty.strength * penalty.root_count / self.typical
        rms = penalty.norms(weight) / penalty.root_count
        weight.mul_(penalty.elements.combined(_share(rms - lr * strength * price, rms), "product"))


class Gates(OwnStrength):
    """g <- max(0, g - rate / price (dL/dg + rho price)) of every index, multiplied into side A.

    With one rate for all, gates would close in the order of prices. It is bounded for small prices.
    """

    def __init__(self, compressor: Compressor):
        super().__init__(compressor)
        state, self._rate = self._state, 0.0
        self.gates = {name: torch.ones(size) for name, size in state.widths().items()}
        cut_ = state.cut_

        def followed_(decision: Decision, when: str) -> None:
            cut_(decision, when)
            widths = state.widths()
            self.gates = {name: self.gates[name][decision.keeps[name]] for name in widths}

        state.cut_ = followed_  # type: ignore[method-assign]

    def first_strength(self) -> float:
        return WORTH * float(self._scalars.smoothed) / self._state.fma

    def shrink_(self, lr: float, strength: float) -> None:
        plan, course = self._state.plan, self.course
        weight, penalty, prices = plan.store.weight, plan.penalty, plan.prices
        if self.typical is None:
            descent = REACHED * course.steps - course.descent_at
            self._rate = 1 / (strength * descent)
            self.typical = float(np.median(np.concatenate([*prices.values()])))
        slopes = penalty.group_sums(weight, plan.store.grad)
        factors = torch.ones_like(slopes)
        for name, span in penalty.ranges.items():
            gate, side = self.gates[name], span.side("a")
            price = torch.from_numpy(prices[name]).to(gate)
            # The derivative by the gate, of which the weights are multiples.
            slope = slopes[side] / gate.clamp(min=0.05)
            rate = self._rate / price.clamp(min=self.typical)
            new = (gate - rate * (slope + strength * price)).clamp(0, 1.5)
            new = torch.where(gate > 0, new, 0.0)
            factors[side] = _share(new, gate)
            self.gates[name] = new
        weight.mul_(penalty.elements.combined(factors, "product"))


class Vectors(DeviceStep):
    """The penalty of gains and scales alone, which are all vectors of this model."""

    @torch.no_grad()
    def update_(self, loss: Tensor) -> Tensor:
        penalty, store = self._state.plan.penalty, self._state.plan.store
        whole = type(penalty).gradient

        def gradient(weight: Tensor, norms: Tensor | None = None) -> Tensor:
            result = whole(penalty, weight, norms)
            for segment in store.segments.values():
                if len(segment.shape) > 1:
                    result[segment.start : segment.end] = 0
            return result

        penalty.gradient = gradient  # type: ignore[method-assign]
        try:
            return super().update_(loss)
        finally:
            del penalty.gradient


def _share(left: Tensor, norms: Tensor) -> Tensor:
    """What is left of the norms, one where there is none."""
    return torch.where(norms > 0, left.clamp(min=0) / norms.clamp(min=1e-20), 1.0)


def fresh_gauge_(model: Transformer, fresh: Transformer, sweeps: int = 20) -> None:
    """Rescale the sides of every axis, and the levels of normalisers; outputs stay the same.

    Each index gets the ratio of sides, and each normaliser the RMS of gains, of a fresh model.
    """
    tensors, table = named_tensors(model), model.axis_table()
    ratios = {axis.name: _sides(axis.name, fresh) for axis in table.axes}
    for _ in range(sweeps):
        for axis in table.axes:
            aim = ratios[axis.name]
            wanted = (aim[0] / aim[1]).mean()
            now = _sides(axis.name, model)
            reference.rescale_(axis, (wanted * now[1] / now[0]).sqrt(), tensors)
        for norm in table.norms:
            _set_gain_(norm.gain, norm.weight, tensors, named_tensors(fresh))


def _sides(name: str, model: Transformer) -> tuple[Tensor, Tensor]:
    """The RMS of both sides of every index of an axis."""
    tensors = named_tensors(model)
    axis = model.axis_table()[name]
    a, b = (
        reference.side_rms(axis, slots, tensors, reference.side_counts(axis, slots, tensors))
        for _, slots in axis.sides()
    )
    return a, b


@torch.no_grad()
def _set_gain_(gain: str, weight: str, tensors: Tensors, fresh: Tensors) -> None:
    root = float(fresh[gain].square().mean().sqrt() / tensors[gain].square().mean().sqrt())
    tensors[gain].mul_(root)
    tensors[weight].mul_(root**2)


# --- the stand-in, and what follows ---------------------------------------------------------------


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


def course_of(compressor: Compressor) -> WorkCourse:
    assert compressor.pilot is not None
    course = compressor.pilot.course
    assert isinstance(course, WorkCourse)
    return course


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
