"""Writes an imported model as a run folder of step 0, which `info` and `load_model` read.

The folder has no summary.json: the model is not the result of a run here.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.errors import UserError, first_line
from gaugelasso.export.folder import check_free, new_folder
from gaugelasso.files.durable import write_new
from gaugelasso.files.untrusted import read_plain
from gaugelasso.importing import build, open_source
from gaugelasso.importing.comparison import Difference, compare
from gaugelasso.runs import checkpoint
from gaugelasso.runs.environment import environment
from gaugelasso.runs.folder import CHECKPOINTS
from gaugelasso.runs.reading import exists, is_folder
from gaugelasso.runs.structures import describe
from gaugelasso.runs.writing import write_json

# Copied as data, where the source has them.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_LARGEST = 2**28  # bytes of such a file


@dataclass(frozen=True)
class Imported:
    """A written folder. `difference` is from transformers, or says why there is none."""

    folder: Path
    parameters: int
    source_parameters: int
    fma: float
    length: int
    copied: tuple[str, ...]
    difference: Difference | str


@dataclass
class _Unpressed:
    """What a checkpoint needs: no optimizer has seen the model yet."""

    model: Compressible
    steps: int = 0

    def state_tensors(self) -> dict[str, Tensor]:
        return {}


def write_imported(path: Path, out: Path) -> Imported:
    """Import a model and write it to a new folder; UserError, with nothing written, if it fails."""
    check_free(out)
    source = open_source(path)
    model = build(source)
    table, tensors = model.axis_table(), named_tensors(model)
    fma = total_fma(table, ACCOUNTINGS["fma"], tensors)
    difference = compare(path, model) if is_folder(path) else "a GGUF file is not compared"
    config = {
        "task": {"name": "imported", "source": str(path)},
        "model": {},
        "target": {"loss": None},
        "compress": {"accounting": "fma"},
        "train": {"seed": 0, "steps": 0, "eval_every": 1},
    }
    with new_folder(out) as folder:
        write_json(folder / "config.json", config)
        write_json(folder / "environment.json", environment("cpu"))
        initial = {"fma": fma, "widths": table.widths(tensors), **describe(model)}
        write_json(folder / "initial.json", initial)
        checkpoint.save(folder / CHECKPOINTS, _Unpressed(model), {"logs": {}})
        copied = tuple(name for name in TOKENIZER if is_folder(path) and _copy(path, name, folder))
    return Imported(
        folder=out,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        source_parameters=source.parameters,
        fma=fma,
        length=model.initial_spec.length,
        copied=copied,
        difference=difference,
    )


def _copy(source: Path, name: str, folder: Path) -> bool:
    """Copy a file if the source has it; it is not parsed."""
    path = source / name
    if not exists(path):
        return False
    try:
        data = read_plain(path, _LARGEST)
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r}: cannot be read ({first_line(error)})") from None
    write_new(folder / name, [data])
    return True
