"""Structures: a network's shapes as JSON, and the class that builds a network from them.

The structure of the built-in transformer stands alone in its file. For any other class the file
also holds `model_class`, a reference to it; building the network imports that class.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.errors import UserError, errors_of, first_line
from gaugelasso.memory import memory_bytes
from gaugelasso.models import Transformer, TransformerSpec, same_network
from gaugelasso.plugins import NamedBy, Reference, class_reference
from gaugelasso.runs.reading import read_json
from gaugelasso.runs.training_work import behind_structure

STRUCTURE, MODEL_CLASS = "structure", "model_class"
# Structure and shapes with which a model was found to be rebuildable: a cut changes them.
_checked: "WeakKeyDictionary[Compressible, tuple[str, dict[str, torch.Size]]]" = WeakKeyDictionary()


def describe(model: Compressible) -> dict[str, Any]:
    """The keys from which `Structure.read` can build the network again."""
    reference = None if type(model) is Transformer else class_reference(type(model))
    own = {MODEL_CLASS: reference} if reference else {}
    return {**own, STRUCTURE: model.structure()}


def described_alone(model: Compressible) -> dict[str, Any]:
    """The same as the whole content of a file; a transformer's is its structure without a key."""
    described = describe(model)
    return described if MODEL_CLASS in described else described[STRUCTURE]


@dataclass(frozen=True)
class Structure:
    """Shapes that a file describes. `model_class` is empty for the built-in transformer.

    `training_fma` is the training work that it took to find them, where the file says it.
    """

    path: Path
    data: Any
    model_class: str = ""
    training_fma: float | None = None

    @classmethod
    def read(cls, path: Path) -> "Structure":
        """Read a JSON file with a structure, alone or as a key; imports nothing."""
        data = read_json(path)
        if not isinstance(data, dict):
            return cls(path, data)
        model_class = data.get(MODEL_CLASS, "")
        if not isinstance(model_class, str):
            raise UserError(f"{str(path)!r}: {MODEL_CLASS!r} is not a string")
        return cls(path, data.get(STRUCTURE, data), model_class, behind_structure(path, data))

    def spec(self) -> TransformerSpec:
        """The structure of a transformer that fits into memory; UserError if it is none."""
        if self.model_class:
            raise UserError(
                f"{str(self.path)!r}: a structure of {self.model_class!r}, not of the built-in "
                "transformer"
            )
        with errors_of(self.path):
            spec = TransformerSpec.from_dict(self.data)
        check_fits_memory(spec, self.path)
        return spec

    def builds_same(self, other: "Structure") -> bool:
        """Whether both build the same network."""
        if self.model_class or other.model_class:
            return (self.model_class, self.data) == (other.model_class, other.data)
        return same_network(self.spec(), other.spec())

    def build(self, seed: int = 0, weights: Path | None = None) -> Compressible:
        """The network, with initial weights; does not advance torch's generators.

        `weights` is the file that they are about to be read from.
        """
        if not self.model_class:
            spec = self.spec()
            # Checked before the model is built: a damaged structure must not exhaust the memory.
            if weights and 4 * spec.weights > weights.stat().st_size:
                raise UserError(
                    f"{str(weights)!r}: too short, the structure needs {spec.weights:,} weights"
                )
            return Transformer(spec, seed)
        by = NamedBy(self.path.parent, _run_of(self.path))
        with errors_of(self.path), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            reference = Reference.parse(MODEL_CLASS, self.model_class, by)
            return _rebuilt(reference.load(by), reference, self.data)


def check_fits_memory(spec: TransformerSpec, path: Path) -> None:
    """UserError, naming the file of the structure, if its weights do not fit into memory."""
    memory = memory_bytes()
    if 4 * spec.weights > memory:
        raise UserError(
            f"{str(path)!r}: the structure has {spec.weights:.2g} weights, more than the "
            f"{memory / 2**30:.0f} GiB of memory of this machine can hold"
        )


def check_rebuildable(model: Compressible) -> None:
    """UserError unless a checkpoint of the model could be loaded again: better now than later."""
    cls = type(model)
    if cls is Transformer:
        return
    if (text := class_reference(cls)) is None:
        raise UserError(
            f"{cls.__qualname__} is defined inside a function, or in no file, so a checkpoint of "
            "it could not be loaded; define the class at the top level of a Python file"
        )
    try:
        described = json.dumps(model.structure(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{cls.__name__}.structure() is not JSON ({first_line(error)}); return a dict of "
            "numbers, strings and lists"
        ) from None
    here = _shapes(model)
    if _checked.get(model) == (described, here):
        return
    source, _, name = text.rpartition(":")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        again = _rebuilt(cls, Reference(MODEL_CLASS, source, name), json.loads(described))
    if here != (there := _shapes(again)):
        odd = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))[0]
        shapes = (tuple(s[odd]) if odd in s else "missing" for s in (here, there))
        raise UserError(
            f"{cls.__name__}.from_structure(structure()) builds another network: tensor {odd!r} is "
            "{}, not {}; structure() must describe every width".format(*reversed([*shapes]))
        )
    _checked[model] = described, here


def _shapes(model: Compressible) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in named_tensors(model).items()}


def _rebuilt(cls: Any, reference: Reference, structure: Any) -> Compressible:
    if not isinstance(cls, type) or not issubclass(cls, Compressible):
        raise reference.error("it does not derive from gaugelasso.Compressible")
    if not isinstance(structure, dict):
        raise UserError(f"a structure is a JSON object, not {type(structure).__name__}")
    try:
        model = cls.from_structure(structure)
    except UserError:
        raise
    except Exception as error:
        raise reference.error(
            f"from_structure raised {type(error).__name__}: {first_line(error)}; the default calls "
            "the class with the keys of structure() as arguments"
        ) from error
    if not isinstance(model, Compressible):
        raise reference.error(f"from_structure returned {type(model).__name__}, not a model")
    return model


def _run_of(path: Path) -> Path:
    """The folder that a file came with: the run of a checkpoint, else the folder of the file."""
    folder = path.absolute().parent
    return folder.parents[1] if folder.parent.name == "checkpoints" else folder
