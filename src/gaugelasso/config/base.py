"""[model] with `from`: a model that begins with the weights of a folder, such as an imported one.

Structure and vocabulary come from the folder, so the other keys of the section are refused. The
resolved section has the fingerprint of the weights, and is read without the folder.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.files import tokenizer
from gaugelasso.files.tensors import read_tensors
from gaugelasso.files.typed import typed
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs import checkpoint
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.runs.reading import exists, is_folder
from gaugelasso.tasks import TOKEN_TASKS, Task, TokenText
from gaugelasso.tasks.own import sequences
from gaugelasso.tasks.stored import expand, searched_in

_KEYS = {"from": str, "context": int, "sha256": str}
# The parts of a structure that the task decides.
_OF_TASK = ("inputs", "outputs", "input_kind", "causal")
# What to do where a part does not fit.
_HINTS = {
    "outputs": "; give a model with a head over tokens, such as BertForMaskedLM or "
    "RobertaForMaskedLM",
    "causal": "; 'tokens' is a task for causal models, 'masked_tokens' one for encoders",
}


@dataclass(frozen=True)
class Folder:
    """The folder of a key; opened, and its files compared with their digests, on first use."""

    name: str
    key: str = "model.from"

    @property
    def title(self) -> str:
        return f"{self.key} = {self.name!r}"

    @property
    def path(self) -> Path:
        return expand(self.name, self.key)

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        if not is_folder(self.path):
            raise UserError(
                f"{self.title}: no such folder{searched_in(self.path)}; gaugelasso import writes "
                "one"
            )
        found = checkpoint.last(self.path)
        if found is None:
            raise UserError(
                f"{self.title}: holds no checkpoint; give a folder that gaugelasso import wrote, "
                "or a run"
            )
        return found

    @functools.cached_property
    def spec(self) -> TransformerSpec:
        return self.checkpoint.structure().spec()


@dataclass(frozen=True)
class BaseModel:
    """[model] with `from`. `context` is the most positions of a sequence; 0: `task.length`."""

    base: Folder
    context: int = 0
    sha256: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The section as a config has it."""
        return {"from": self.base.name, "context": self.context, "sha256": self.sha256}

    def task_keys(self, section: Any) -> Any:
        """[task], for a task of tokens with the vocabulary and the tokenizer of the folder."""
        if not isinstance(section, Mapping) or section.get("name") not in TOKEN_TASKS:
            return section
        found = dict(section)
        if not found.get("vocabulary"):
            found["vocabulary"] = self.base.spec.inputs
        if "tokenizer" not in found and exists(self.base.path / tokenizer.NAME):
            found["tokenizer"] = self.base.name
        return found

    def resolved(self, task: Task) -> "BaseModel":
        """With context and fingerprint; UserError if the model does not fit the task."""
        length = sequences(task).length
        if 0 < self.context < length:
            raise UserError(
                f"model.context = {self.context}: must be at least task.length = {length}, or 0"
            )
        found = replace(self, context=self.context or length)
        if found.sha256:
            return found  # of a run, whose base may be gone by now; `build` compares it
        found.check(task)
        return replace(found, sha256=found.base.checkpoint.fingerprint())

    def check(self, task: Task) -> None:
        """UserError unless the folder holds this model, and it fits the task."""
        if self.sha256 and self.base.checkpoint.fingerprint() != self.sha256:
            raise UserError(
                f"{self.base.title}: its weights are not those of model.sha256 = "
                f"{self.sha256[:12]!r}...; put these back, or remove model.sha256"
            )
        here, spec = sequences(task), self.base.spec
        hints = _HINTS if isinstance(task, TokenText) else {}
        for name in _OF_TASK:
            wanted, there = getattr(here, name), getattr(spec, name)
            if wanted != there:
                raise UserError(
                    f"{self.base.title}: its {name} is {there!r}, and the task needs {wanted!r}"
                    f"{hints.get(name, '')}"
                )
        # Positions of tokens can be fewer; those of patches are places in an image.
        bound = spec.positions and spec.input_kind != "tokens"
        if self.context > spec.length or (bound and self.context != spec.length):
            what = "learned positions" if spec.positions else "positions"
            raise UserError(
                f"{self.base.title}: the model has {spec.length} {what}, and task.length = "
                f"{here.length} and model.context make {self.context}"
            )

    def build(self, task: Task, seed: int) -> Transformer:
        """The model with the weights of the folder; nothing is drawn."""
        self.check(task)
        model = self.base.checkpoint.model()
        assert isinstance(model, Transformer)  # `check` refuses others
        model.set_context_(self.context)
        return model

    def spec(self, task: Task) -> TransformerSpec:
        self.check(task)
        return replace(self.base.spec, length=self.context)

    def matrix_sizes(self) -> list[int]:
        """The numbers of elements of the weight matrices."""
        tensors = read_tensors(self.base.checkpoint.path / "model.safetensors").values()
        return [tensor.numel() for tensor in tensors if tensor.ndim >= 2]


def find_base(section: Any) -> BaseModel | None:
    """The model that a [model] section with `from` names; None if it has no such key."""
    if not isinstance(section, Mapping) or "from" not in section:
        return None
    for key, value in section.items():
        if key not in _KEYS:
            raise UserError(
                f"model.{key} = {value!r}: the structure comes from model.from = "
                f"{section['from']!r}; remove model.{key}, or model.from"
            )
    values = {key: typed(f"model.{key}", value, _KEYS[key]) for key, value in section.items()}
    if not values["from"]:
        raise UserError("model.from is empty; give a folder that gaugelasso import wrote, or a run")
    if values.get("context", 0) < 0:
        raise UserError(f"model.context = {values['context']}: must be 0 or more")
    return BaseModel(Folder(values["from"]), values.get("context", 0), values.get("sha256", ""))
