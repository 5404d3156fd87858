"""The reference of a run: what its full model reaches with the same steps and no pressure.

With `target.above_full` this is measured before the run: trained in the run's own folder, or read
from a finished run. Stopped and resumed like any run.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gaugelasso.config import Config
from gaugelasso.config.plain import plain
from gaugelasso.distributed import ALONE, Team
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import REFERENCE, REFERENCE_FILE, Existing, RunFolder
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.structures import Structure
from gaugelasso.training.evaluation import choose_device
from gaugelasso.training.opening import check_base, check_data
from gaugelasso.training.records import Progress
from gaugelasso.training.reference_file import Origin, Reference, load_reference
from gaugelasso.training.resume import FREE, check_same_config, data_of
from gaugelasso.training.step import microbatches_of
from gaugelasso.training.structure import check_fits
from gaugelasso.training.trainer import Trainer

_log = logging.getLogger(__name__)
# Settings of [train] that a reference must share; its seed may be another.
_SHARED_TRAIN_KEYS = ("steps", "batch", "accumulate")


class Build(Protocol):
    """Creates the trainer of a run, as `Trainer` itself does."""

    def __call__(
        self,
        config: Config,
        out: Path,
        existing: Existing,
        on_progress: Callable[[Progress], None] | None,
        team: Team,
        structure: Structure | None,
    ) -> Trainer: ...


def needs_reference(config: Config) -> bool:
    """Whether the loss that the config names is still to be measured."""
    return config.target.kind == "above_full" and config.target.reference_loss is None


def with_reference(
    config: Config,
    out: Path,
    existing: Existing = "refuse",
    on_progress: Callable[[Progress], None] | None = None,
    team: Team = ALONE,
    structure: Structure | None = None,
    build: Build = Trainer,
) -> Config:
    """The config with the loss of the full model; give it to a `Trainer` that resumes `out`.

    Trains the full model in `out`/reference, unless `target.reference` names a finished run.
    UserError if that loss is not above zero.
    """
    check_fits(config, structure)
    microbatches_of(config, team)
    device = choose_device(config.train.device, team.local)
    team.on_rank0(lambda: check_data(config, device))
    team.on_rank0(lambda: check_base(config, out, existing, structure))
    named = config.target.reference
    known = existing == "resume" and team.on_rank0(lambda: exists(out / REFERENCE_FILE))
    # First of all, because --overwrite removes the run that is in the folder.
    given = None
    if named is not None and not known:
        given = team.on_rank0(lambda: _of_run(config, Path(named)).to_dict())
    before = team.on_rank0(lambda: _open(config, out, existing))
    found = before or given
    if found is None:
        folder = out / REFERENCE
        if not team.on_rank0(lambda: exists(folder / "summary.json")):
            settings = plain(config, config.train.steps, config.train.cooldown)
            build(settings, folder, "resume", on_progress, team, structure).run()
        found = team.on_rank0(lambda: _of_run(config, folder, own=True).to_dict())
    if not before:
        team.on_rank0(lambda: _write(out, found))
    return replace(config, target=replace(config.target, reference_loss=found["loss"]))


def _open(config: Config, out: Path, existing: Existing) -> dict[str, Any] | None:
    """Make the run folder, or go on with it; what an earlier start found, if it did."""
    folder = RunFolder.open(out, existing)
    try:
        if not exists(out / "config.json"):
            folder.write("config.json", config.to_dict())
            return None
        check_same_config(config, out / "config.json", measured={"reference_loss"})
        found = load_reference(out)
        return None if found is None else found.to_dict()
    finally:
        folder.close()


def _write(out: Path, found: Mapping[str, Any]) -> None:
    folder = RunFolder.open(out, "resume")
    try:
        folder.write(REFERENCE_FILE, dict(found))
    finally:
        folder.close()


def _of_run(config: Config, folder: Path, own: bool = False) -> Reference:
    """The loss of a finished run; UserError if it has none that a share can be added to."""
    key = "the reference" if own else f"target.reference = {str(folder)!r}"
    if not exists(folder / "summary.json"):
        raise UserError(f"{key}: no finished run, summary.json is missing; train it to its end")
    summary = read_json(folder / "summary.json", finite=False)
    loss = summary.get("selection_loss") if isinstance(summary, dict) else None
    if not isinstance(loss, int | float) or not math.isfinite(loss):
        raise UserError(f"{key}: its summary.json has no selection_loss; give another run")
    if loss <= 0:
        raise UserError(
            f"target.above_full = {config.target.above_full:g} is a share of the full model's "
            f"loss, which is {loss:.4g} on selection data ({str(folder)!r}), not above zero; name "
            "target.loss instead"
        )
    differs = () if own else tuple(_differing(config, folder, summary))
    work = summary.get("training_fma")
    work = float(work) if type(work) in (int, float) else None
    origin: Origin = "estimated" if differs else "measured"
    return Reference(float(loss), origin, str(folder), differs, work)


def _differing(config: Config, folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """The settings in which a run differs from the full model of this config."""
    here, there = config.to_dict(), read_json(folder / "config.json")
    if not isinstance(there, dict) or not all(isinstance(there.get(s), dict) for s in here):
        raise UserError(f"target.reference = {str(folder)!r}: its config.json is not of a run")
    pairs = [(section, key) for section in ("task", "model") for key in here[section]]
    pairs += [("train", key) for key in _SHARED_TRAIN_KEYS]
    differs = []
    for section, key in pairs:
        one, other = here[section][key], there[section].get(key)
        if key == "module":  # the same code may be in another folder
            one, other = Path(str(one)).name, Path(str(other)).name
        if one != other and (section, key) not in FREE:
            differs.append(f"{section}.{key}")
    initial = read_json(folder / "initial.json")
    data = initial.get("data", {}) if isinstance(initial, dict) else None
    if data != data_of(config.task):
        differs.append("data")
    if summary.get("fma_final") != summary.get("fma_initial"):
        differs.append("structure, as it was compressed")
    return differs
