"""Advice for the next run: which axes to widen or narrow, which layers to add or remove.

Reads saturation and outcome of finished runs, and rewrites the run's own [model] section.
The rules:

- An axis at its ceiling in most of the layers that kept it was binding. Widen it; the more
  layers it fills, the wider, up to twice its width.
- An axis of which every layer keeps at most a quarter was too wide. Halve it.
- Layers that lost all operators are removed, at most half of the layers. If every layer is full,
  add half as many.
- If the final loss misses its target, nothing is made smaller. If the training loss never reached
  the target, or no structural event took place, the widths carry no information.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gaugelasso.errors import UserError
from gaugelasso.report.data import check_finished, load_condition, run_folders
from gaugelasso.report.goal import is_mostly_held, misses_only_work
from gaugelasso.report.methods import check_one_condition
from gaugelasso.report.outcome import outcome
from gaugelasso.report.run import LAYER_KINDS, Run
from gaugelasso.report.saturation import CEILING, Extent, extents, layer_list
from gaugelasso.report.schema import POSITIVE, check_keys
from gaugelasso.report.toml import comment, to_toml
from gaugelasso.report.verdict import verdict

_SMALL = 0.25
# Key of [model] -> the axis whose width it sets. D bounds all axes that read or write the stream.
_AXES = {"width": "D", "d_k": "d_k", "d_v": "d_v", "d_f": "d_f"}


@dataclass(frozen=True)
class Change:
    """A new value of one key of [model], and the reason."""

    key: str
    old: int
    new: int
    why: str

    def __str__(self) -> str:
        verb = "widen" if self.new > self.old else "narrow"
        if self.key == "layers":
            verb = "more" if self.new > self.old else "fewer"
        return f"{verb} {self.key}, {self.old} → {self.new}: {self.why}"


@dataclass(frozen=True)
class Advice:
    """A sentence about the outcome, changes, remarks, and the next config as TOML."""

    verdict: str
    changes: list[Change]
    remarks: list[str]
    config: str

    @property
    def lines(self) -> list[str]:
        return [self.verdict, *map(str, self.changes), *self.remarks]


def advise(paths: Sequence[Path]) -> Advice:
    """Advice from finished runs that differ only in their seed; over seeds, medians decide."""
    runs = load_condition(run_folders(paths))
    check_one_condition(runs)
    check_finished(runs)
    first = runs[0]
    if first.own_model:
        raise UserError(
            f"{str(first.path)!r}: its model is {first.own_model!r}; advise changes the widths of "
            "the built-in transformer. gaugelasso report shows which axes are at their ceiling"
        )
    if first.is_own_loop:
        raise UserError(
            f"{str(first.path)!r} is the record of a loop of your own, which has no config to "
            "rewrite: the widths are in your code. gaugelasso report shows which axes are at their "
            "ceiling, to widen, and which collapsed, to narrow"
        )
    if "source" in (summary := first.summary or {}):
        raise UserError(
            f"{str(first.path)!r} is of another method ({summary['method']}), whose config does "
            "not compress; give a compressed run of gaugelasso train"
        )
    if "from" in first.config["model"]:
        raise UserError(
            f"{str(first.path)!r} began with the weights of model.from = "
            f"{first.config['model']['from']!r}, whose widths are given; advise changes the widths "
            "of models that are trained from scratch"
        )
    source = repr(str(first.path / "config.json"))
    check_keys(source, first.config["model"], dict.fromkeys(["layers", *_AXES], POSITIVE))
    ends = [outcome(run) for run in runs]
    held = is_mostly_held(runs)
    reached = first.loss_target is None or statistics.median_high(
        end.reached_step is not None for end in ends
    )
    if first.metric_target is not None and not held:
        # A metric has no first step. Where it is missed all cuts may have been taken back.
        reached = statistics.median_high(
            run.widths_at(run.last_step) != run.initial["widths"] for run in runs
        )
    had_event = statistics.median_high(run.had_structural_event for run in runs)
    found = extents(runs) if reached and had_event else None
    changes = [*_width_changes(first, found), *_layer_change(first, found)] if found else []
    kept_wide = (
        []
        if held or misses_only_work(runs)
        else [change.key for change in changes if change.new < change.old]
    )
    changes = [change for change in changes if change.key not in kept_wide]
    _, sentence = verdict(runs)
    return Advice(
        verdict=sentence,
        changes=changes,
        remarks=_remarks(first, held, changes, kept_wide)
        if found
        else [_no_compression(first, reached)],
        config=_next_config(runs, sentence, changes),
    )


def _width_changes(run: Run, found: Mapping[str, list[Extent]]) -> list[Change]:
    changes = []
    for key, kind in _AXES.items():
        old = run.config["model"][key]
        even = key == "d_k" and bool(run.config["model"].get("rope"))
        kept = [axis for axis in found[kind] if not axis.removed]
        full = [axis for axis in kept if axis.at_ceiling]
        most = max((axis.share for axis in kept), default=0.0)
        if 2 * len(full) > len(kept):
            new = wider(old, 1 + len(full) / len(kept), even)
            where = f"{len(full)} of {len(kept)} layers that kept it"
            why = f"at its ceiling in {where}" if key != "width" else f"{most:.0%} of D is left"
        elif most <= _SMALL:
            new = narrower(old, even)
            most_kept = f"more than {most:.0%}" if kept else "any of it"
            part = f"only {most:.0%} of D is left" if key == "width" else ""
            why = part or f"no layer keeps {most_kept}"
        else:
            continue
        changes += [Change(key, old, new, why)] if new != old else []
    return changes


def _layer_change(run: Run, found: Mapping[str, list[Extent]]) -> list[Change]:
    layers: dict[int, list[Extent]] = {}
    for axis in (axis for kind in LAYER_KINDS for axis in found[kind]):
        layers.setdefault(axis.depth or 0, []).append(axis)
    old = run.config["model"]["layers"]
    empty = [depth for depth, axes in sorted(layers.items()) if all(axis.removed for axis in axes)]
    if empty:
        new = max(old - len(empty), math.ceil(old / 2))
        why = f"nothing is left of layer{'s' * (len(empty) > 1)} {layer_list(empty)}"
        return [Change("layers", old, new, why)] if new != old else []
    shares = [statistics.median(axis.share for axis in axes) for axes in layers.values()]
    if min(shares, default=0.0) >= CEILING:
        why = "in every layer most axes are at their ceiling"
        return [Change("layers", old, old + math.ceil(old / 2), why)]
    return []


def wider(old: int, factor: float, even: bool) -> int:
    """A round width greater than the old one, at most `factor` (1 to 2) times it."""
    grain = _grain(old * factor, even)
    return max(int(old * factor / grain) * grain, old + grain)


def narrower(old: int, even: bool) -> int:
    """A round width of at least half the old one."""
    grain = _grain(old / 2, even)
    return min(math.ceil(old / 2 / grain) * grain, old)


def _grain(width: float, even: bool) -> int:
    """The step between round widths: the greatest power of two in an eighth of the width."""
    return max(2 ** math.floor(math.log2(max(width / 8, 1))), 2 if even else 1)


def _no_compression(run: Run, reached: bool) -> str:
    """The remedy where all widths are the initial ones because the penalty was never active."""
    compress = run.config["compress"]
    if compress.get("solver") == "fixed" and not compress.get("rho"):
        remedy = "compress.rho = 0 switches the penalty off; choose another compress.solver."
    elif not reached:
        remedy = f"set more train.steps, another compress.lr, {_looser(run)}, "
        remedy += "or a larger model."
    else:
        remedy = (
            "no structural event took place between warmup and cooldown; set more train.steps, "
        )
        remedy += "or a smaller compress.interval."
    return f"Compression never started, so the widths carry no information: {remedy}"


def _looser(run: Run) -> str:
    """The setting that asks for less."""
    target = run.config["target"]
    if misses_only_work([run]):
        return "a higher target.fma"
    if target.get("above_full") is not None:
        return "a higher target.above_full"
    to_loss = target["loss"] is not None and target.get("metric") is None
    return "a higher target.loss" if to_loss else "another target"


def _remarks(run: Run, held: bool, changes: list[Change], kept_wide: list[str]) -> list[str]:
    remarks = []
    if kept_wide:
        names = ", ".join(kept_wide)
        remarks.append(f"The target was missed, so these are not made smaller: {names}")
    if not held and not changes:
        remarks.append(
            "No axis is at its ceiling in most layers: more train.steps or train.cooldown, or "
            f"{_looser(run)}, will help more than width."
        )
    if held and not changes:
        remarks.append(
            "Nothing to change: no axis is at its ceiling in most layers, and none keeps a "
            "quarter or less in all of them."
        )
    return remarks


def _next_config(runs: Sequence[Run], sentence: str, changes: list[Change]) -> str:
    first = runs[0]
    model = first.config["model"] | {change.key: change.new for change in changes}
    which = f"seed {first.seed}" if len(runs) == 1 else f"{len(runs)} seeds"
    head = [
        f"Written by gaugelasso advise from {first.task}, {which}. {sentence}",
        "A comment gives the reason for each change; all other keys are the run's own."
        if changes
        else "Nothing changed.",
    ]
    remarks = {f"model.{change.key}": f"was {change.old}: {change.why}" for change in changes}
    # The full model has changed, so that its loss is to be measured again.
    target = {key: v for key, v in first.config["target"].items() if key != "reference_loss"}
    sections = first.config | {"model": model, "target": target}
    lines = [*map(comment, head), "", to_toml(sections, remarks)]
    return "\n".join(lines)
