"""What an export is made from: the final model of a finished run, or an imported model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gaugelasso.errors import UserError
from gaugelasso.files.tokenizer import NAME as TOKENIZER
from gaugelasso.inference import Form, InferenceModel
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.checkpoint import at_step, last
from gaugelasso.runs.folder import CHECKPOINTS
from gaugelasso.runs.reading import (
    IMPORTED,
    OWN_LOOP,
    check_has_summary,
    check_run_folder,
    exists,
    read_json,
)

# A form that changes nothing in place, so that it can be traced, and that adds nothing by index:
# onnxscript's optimiser loses what distinguishes adding from replacing.
TRACED = Form(read="gather", write="spread", attention="sdpa")

_KINDS = {dict: "a section", int: "a whole number", str: "a text"}


@dataclass(frozen=True)
class Source:
    """A trained network in eval mode on the CPU, and the JSON files of its run."""

    run: Path
    model: Transformer
    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]

    @property
    def spec(self) -> TransformerSpec:
        return self.model.spec()

    @property
    def task(self) -> str:
        """The name of the task, or the class of a task of the user."""
        task = self.config["task"]
        return str(task.get("name") or task.get("module"))

    @property
    def is_text(self) -> bool:
        """Whether tokens are the bytes of a text."""
        return self.config["task"].get("name") == "charlm"

    @property
    def is_imported(self) -> bool:
        """Whether the model is as it was imported, not the result of a run."""
        return self.config["task"].get("name") == IMPORTED

    @property
    def is_own_loop(self) -> bool:
        """Whether a loop of the user's own recorded the run; its seed is not known."""
        return self.config["task"].get("name") == OWN_LOOP

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokens are those of the tokenizer in the run folder."""
        return exists(self.run / TOKENIZER)

    def served(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> InferenceModel:
        """A new inference form that can be traced."""
        return InferenceModel(self.model, dtype=dtype, forms=TRACED).to(device)


def read_source(run: Path) -> Source:
    """Read a run folder, or that of an imported model.

    UserError if it is not finished, is damaged, or has another model.
    """
    check_run_folder(run)
    config = _table(run / "config.json", "task", dict)
    if not isinstance(config.get("target", {}), dict):
        raise UserError(f"{str(run / 'config.json')!r}: damaged, 'target' is not a section")
    imported = config["task"].get("name") == IMPORTED
    if not imported:
        check_has_summary(run)
    summary = {"steps": 0} if imported else _table(run / "summary.json", "steps", int)
    environment = _table(run / "environment.json", "date", str)
    checkpoint = None if imported else last(run)  # the error of `last` says what to do
    checkpoint = checkpoint or at_step(run / CHECKPOINTS, summary["steps"])
    structure = checkpoint.structure()
    if structure.model_class:
        raise UserError(
            f"{str(run)!r}: its model is a {structure.model_class!r}; export needs the built-in "
            "transformer"
        )
    model = checkpoint.model()
    assert isinstance(model, Transformer)
    return Source(run, model.eval(), config, environment, summary)


def _table(path: Path, key: str, kind: type) -> dict[str, Any]:
    data = read_json(path, finite=False)
    if not isinstance(data, dict) or type(data.get(key)) is not kind:
        raise UserError(f"{str(path)!r}: damaged, {key!r} is missing or is not {_KINDS[kind]}")
    return data
