"""Runs of the tiny config, whole or broken off, and what they leave behind."""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gaugelasso.runs import checkpoint
from gaugelasso.runs.folder import Existing
from gaugelasso.runs.manifest import write_manifest
from gaugelasso.runs.reading import read_rows
from gaugelasso.training.trainer import Trainer
from tests.tiny import tiny

# Columns that a clock fills: no two runs agree on them.
CLOCK = {"step_ms", "wall_s", "seconds"}


class Stop(Exception):
    """The power goes off."""


def start(
    folder: Path, name: str = "run", existing: Existing = "refuse", **changes: Any
) -> Trainer:
    return Trainer(tiny(folder, **changes), folder / name, existing)


def finish(folder: Path, name: str = "run", **changes: Any) -> Path:
    trainer = start(folder, name, **changes)
    trainer.run()
    return trainer.folder.path


def stop_at(trainer: Trainer, step: int) -> None:
    """Run until `step` steps are done, then die without a goodbye."""
    take = trainer._step

    def one() -> Any:
        if trainer.compressor.steps == step:
            raise Stop
        return take()

    trainer._step = one  # type: ignore[method-assign]
    with pytest.raises(Stop):
        trainer.run()


def keep_images(trainer: Trainer, *steps: int) -> None:
    """Before these steps, or each, copy what a kill would leave into a folder of its number."""
    take = trainer._step

    def one() -> Any:
        step = trainer.compressor.steps
        image = trainer.folder.path.with_name(str(step))
        if (not steps or step in steps) and not image.exists():
            # Without the lock, which names a process that lives on.
            shutil.copytree(
                trainer.folder.path,
                image,
                ignore=shutil.ignore_patterns("run.lock"),
                copy_function=_copy_or_link,
            )
        return take()

    trainer._step = one  # type: ignore[method-assign]


def _copy_or_link(source: str, target: str) -> None:
    """Files of checkpoints are never written again, so that images may share them."""
    if Path(source).parents[1].name == "checkpoints":
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


@cache
def _history(changes: tuple[tuple[str, Any], ...]) -> Path:
    """A folder with a finished run, `whole`, and what a kill before each of its steps leaves."""
    home = Path(tempfile.mkdtemp(prefix="gaugelasso-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    trainer = start(home, "whole", **dict(changes))
    keep_images(trainer)
    trainer.run()
    return home


def finished(folder: Path, name: str = "run", **changes: Any) -> Path:
    """As `finish`, but equal runs are trained once: not for tests that patch the package."""
    home = _history(tuple(sorted(changes.items())))
    return Path(shutil.copytree(home / "whole", folder / name))


def killed(folder: Path, step: int, name: str = "run", **changes: Any) -> Path:
    """A run that was killed before this step. As in `finished`, equal runs are trained once."""
    home = _history(tuple(sorted(changes.items())))
    return Path(shutil.copytree(home / str(step), folder / name))


def start_at(folder: Path, step: int, name: str = "run", **changes: Any) -> Trainer:
    """As `start`, but goes on from the last checkpoint before this step of a run like it.

    Call it before the package is patched: that run is trained once, for all tests.
    """
    killed(folder, step, name, **changes)
    return start(folder, name, "resume", **changes)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def plain(data: Any) -> Any:
    """As JSON says it."""
    return json.loads(json.dumps(data))


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in read_rows(folder / name)]


def newest(folder: Path) -> Path:
    """The newest checkpoint of a run."""
    found = checkpoint.find(folder)
    assert found
    return found.path


def sign(path: Path) -> None:
    """Write the manifest of a checkpoint as its files are now: whoever changed them knew how."""
    manifest = read(path / "manifest.json")
    if all((path / name).exists() for name in manifest["files"]):
        digests = {
            name: hashlib.sha256((path / name).read_bytes()).hexdigest()
            for name in manifest["files"]
        }
        write_manifest(path, manifest["step"], digests)


PARTS = ("model", "optimizer", "random")


def final_tensors(folder: Path, parts: tuple[str, ...] = PARTS) -> dict[str, Tensor]:
    held = (load_file(newest(folder) / f"{part}.safetensors") for part in parts)
    return {name: tensor for tensors in held for name, tensor in tensors.items()}


def outcome(folder: Path) -> dict[str, Any]:
    return {k: v for k, v in read(folder / "summary.json").items() if k not in CLOCK}


def assert_same_run(one: Path, other: Path, parts: tuple[str, ...] = PARTS) -> None:
    """Equal to the last bit, but for the clock."""
    assert rows(one, "metrics.jsonl") == rows(other, "metrics.jsonl")
    assert rows(one, "events.jsonl") == rows(other, "events.jsonl")
    assert outcome(one) == outcome(other)
    tensors, others = final_tensors(one, parts), final_tensors(other, parts)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
