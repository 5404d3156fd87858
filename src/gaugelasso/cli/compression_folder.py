"""The folder that `compress` writes: one entry for each of its stages."""

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gaugelasso.cli.compression_given import is_base, is_run
from gaugelasso.errors import UserError
from gaugelasso.export import FORMS
from gaugelasso.importing.folder import write_from_run, write_imported
from gaugelasso.runs import checkpoint
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.runs.folder import Existing, RunFolder
from gaugelasso.runs.new_folder import new_folder
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.writing import make_folder, move, remove, writing
from gaugelasso.tasks.stored import expand

_BASE, _ORIGINAL, _CONFIG, _RUN = "base", "original.json", "config.toml", "run"
# config.toml first: without it the other stages are done again.
_ENTRIES = (_CONFIG, _ORIGINAL, _RUN, *FORMS, _BASE)
# What --overwrite replaces; under the second name while it is moved there or back.
_REPLACED, _MOVING = "replaced", "replaced.tmp"
# It is renamed before it is removed: half of it must not come back after a kill.
_REMOVED = "removed.tmp"
# What a command that was killed was about to write or to remove.
_UNFINISHED = re.compile(rf"{_REMOVED}|({'|'.join(_ENTRIES)})(\.\d+)?\.tmp")


@dataclass(frozen=True)
class Stages:
    """Where each stage leaves its result."""

    out: Path

    @property
    def base(self) -> Path:
        """The imported model."""
        return self.out / _BASE

    @property
    def original(self) -> Path:
        """The figures of the original."""
        return self.out / _ORIGINAL

    @property
    def config(self) -> Path:
        """What was chosen."""
        return self.out / _CONFIG

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.out / _RUN

    def import_base(self, model: Path) -> str:
        """Import the model, or copy it if that is done already; returns what to print."""
        if is_run(model):
            write_from_run(model, self.base)
            return f"the model of the run {str(model)!r}"
        if is_base(model):
            with new_folder(self.base) as folder:
                ignored = shutil.ignore_patterns("export", "*.tmp")
                shutil.copytree(model, folder, ignore=ignored, dirs_exist_ok=True)
            return f"copied from {str(model)!r}"
        found = write_imported(model, self.base)
        difference = found.difference
        compared = (
            f"logits not compared ({difference})"
            if isinstance(difference, str)
            else f"logits differ from transformers by {difference}"
        )
        return f"{found.parameters:,} parameters; {compared}"

    @contextlib.contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """If a UserError is raised inside, remove the stages that were not there before.

        What --overwrite replaces comes back then, or where the import does not end for another
        reason. It is removed when nothing is raised.
        """
        paths, there = (self.config, self.original, self.base), exists(self.out)
        before = [path for path in paths if exists(path)]
        try:
            yield
        except BaseException as error:
            if isinstance(error, UserError):
                for path in paths:
                    if path not in before:
                        remove(path)
            if not exists(self.base):
                self.put_back()
            if not there and exists(self.out):
                with contextlib.suppress(OSError):  # something else is in it
                    self.out.rmdir()
            raise
        if exists(self.out / _REPLACED):
            move(self.out / _REPLACED, self.out / _REMOVED)
            remove(self.out / _REMOVED)

    def remove_unfinished(self) -> None:
        """Remove what a killed command has left half written or half removed."""
        for path in list(self.out.iterdir()):
            if _UNFINISHED.fullmatch(path.name):
                remove(path)

    def set_aside(self) -> None:
        """Move all stages to where `put_back` finds them, also after the process was killed."""
        if exists(self.out / _REPLACED):  # the stages are those of a command that was killed
            for name in _ENTRIES:
                remove(self.out / name)
            return
        moving = self.out / _MOVING
        make_folder(moving)
        for name in _ENTRIES:
            if exists(self.out / name):
                move(self.out / name, moving / name)
        move(moving, self.out / _REPLACED)

    def put_back(self) -> None:
        """Undo `set_aside`, or what a killed process has done of it."""
        replaced, moving = self.out / _REPLACED, self.out / _MOVING
        if exists(replaced):
            move(replaced, moving)
        if exists(moving):
            for path in list(moving.iterdir()):
                move(path, self.out / path.name)
            with writing(moving):
                moving.rmdir()

    def check_same_base(self, model: Path) -> None:
        """UserError unless the base was made from this model."""
        if is_base(model) or is_run(model):
            same = _checkpoint(model).fingerprint() == _checkpoint(self.base).fingerprint()
        else:
            config = read_json(self.base / "config.json")
            task = config.get("task") if isinstance(config, dict) else None
            same = isinstance(task, dict) and task.get("source") == str(model)
        if not same:
            raise UserError(
                f"--resume: {str(self.base)!r} was not imported from {str(model)!r}; give the same "
                "MODEL again, or choose another --out"
            )


def opened(out: Path, model: Path, texts: Mapping[str, str | None], existing: Existing) -> Stages:
    """The folder, new or to go on with. UserError, with nothing changed, if it cannot be used.

    `texts` are the texts that are given, by option. They are looked for first, as `read_given`
    looks for the model: a wrong name must not cost the result that --overwrite replaces.
    """
    given = {option: expand(text, option) for option, text in texts.items() if text is not None}
    for option, path in given.items():
        if not exists(path):
            raise UserError(f"{option} {texts[option]!r}: no such file or folder")
    stages = Stages(out)
    if existing == "resume":
        if exists(out) and any(out.iterdir()):
            _check_own(out)
            stages.remove_unfinished()
            if exists(out / _MOVING):  # a command was killed before it had written anything
                stages.put_back()
        return stages
    if existing == "refuse":
        RunFolder.check_free(out)
        return stages
    if exists(out):
        _check_own(out)
        place = out.resolve()
        for path in (model, *given.values()):
            if place in (path.resolve(), *path.resolve().parents):
                raise UserError(
                    f"--overwrite would remove {str(path)!r}, which is in {str(out)!r}; choose "
                    "another --out"
                )
        if exists(stages.run):
            # Takes the lock of the run: refused while it trains.
            RunFolder.open(stages.run, "resume").close()
        stages.remove_unfinished()
        stages.set_aside()
    return stages


def _checkpoint(folder: Path) -> Checkpoint:
    found = checkpoint.find(folder)
    if found is None:
        raise UserError(f"{str(folder)!r}: holds no checkpoint; import the model again")
    return found


def _check_own(out: Path) -> None:
    """UserError if the folder holds anything that this command did not write."""
    if not out.is_dir():
        raise UserError(f"output {str(out)!r} is a file; give a folder")
    known = {*_ENTRIES, _REPLACED, _MOVING}
    names = sorted(path.name for path in out.iterdir())
    others = [name for name in names if name not in known and not _UNFINISHED.fullmatch(name)]
    if others:
        raise UserError(
            f"output {str(out)!r} holds {others[0]!r}, which gaugelasso compress did not write; "
            "move it away, or choose another --out"
        )
