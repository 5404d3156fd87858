"""Writes an imported model as a run folder of step 0, which `info` and `load_model` read.

The folder has no summary.json: the model is not the result of a run here.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.files.durable import write_new
from gaugelasso.files.tokenizer import NAME as TOKENIZER
from gaugelasso.files.tokenizer import parse_tokenizer, read_files, tokenizers_library
from gaugelasso.importing import build, open_source
from gaugelasso.importing.comparison import Difference, Reference, compare, load_reference
from gaugelasso.importing.source import Source
from gaugelasso.models import Transformer
from gaugelasso.runs import checkpoint
from gaugelasso.runs.environment import environment
from gaugelasso.runs.folder import CHECKPOINTS
from gaugelasso.runs.new_folder import check_free, new_folder
from gaugelasso.runs.reading import IMPORTED, exists, is_folder
from gaugelasso.runs.structures import describe
from gaugelasso.runs.writing import write_json


@dataclass(frozen=True)
class Imported:
    """A written folder.

    `changes` says which parameters the source does not have, or has alone. `difference` is from
    transformers, `tokenizer` its number of tokens; or each says why there is none. `reference` is
    the source in transformers, if it was compared.
    """

    folder: Path
    parameters: int
    source_parameters: int
    changes: str
    fma: float
    length: int
    tokenizer: int | str
    difference: Difference | str
    reference: Reference | None


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
    files = source.tokenizer()
    tokenizer = _tokens(files, path, model.initial_spec.inputs)
    reference = load_reference(source)
    difference = reference if isinstance(reference, str) else compare(source, reference, model)
    write_model(model, out, str(path), {} if isinstance(files, str) else files)
    return Imported(
        folder=out,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        source_parameters=source.parameters,
        changes=_changes(model, source),
        fma=_work(model),
        length=model.initial_spec.length,
        tokenizer=tokenizer,
        difference=difference,
        reference=None if isinstance(reference, str) else reference,
    )


def missing_tokenizer(path: Path) -> str | None:
    """Why a source, or a folder that was made of one, has no tokenizer; None if it has.

    UserError if no tokenizer can be read here.
    """
    tokenizers_library()
    if is_folder(path):
        return None if exists(path / TOKENIZER) else f"{TOKENIZER} is missing"
    files = open_source(path).tokenizer()
    return files if isinstance(files, str) else None


def write_from_run(run: Path, out: Path) -> None:
    """Write the model of a run, a built-in transformer, and its tokenizer to a new folder."""
    model = checkpoint.load_model(run)
    assert isinstance(model, Transformer)
    write_model(model, out, str(run), read_files(run))


def write_model(model: Transformer, out: Path, origin: str, tokenizer: Mapping[str, bytes]) -> None:
    """Write a model with the files of its tokenizer to a new folder; `origin` says what it is."""
    config = {
        "task": {"name": IMPORTED, "source": origin},
        "model": {},
        "target": {"loss": None},
        "compress": {"accounting": "fma"},
        "train": {"seed": 0, "steps": 0, "eval_every": 1},
    }
    widths = model.axis_table().widths(named_tensors(model))
    with new_folder(out) as folder:
        write_json(folder / "config.json", config)
        write_json(folder / "environment.json", environment("cpu"))
        initial = {"fma": _work(model), "widths": widths, **describe(model)}
        write_json(folder / "initial.json", initial)
        checkpoint.save(folder / CHECKPOINTS, _Unpressed(model), {"logs": {}})
        for name, content in tokenizer.items():
            write_new(folder / name, [content])


def _changes(model: Transformer, source: Source) -> str:
    """The parameters that the source does not have, by kind, and those that it has alone."""
    spec, table = model.initial_spec, tuple(model.embedding.table.shape)
    of_table = [shape for shape in source.shapes.values() if shape == table]
    headless = not spec.causal and source.architecture.endswith("Model")
    kinds = {
        "scales of writes": True,
        "means and spreads of norms": spec.post_norm,
        "mean and spread of the tied table": spec.tied_mean,
        # That of a source may be its table, which is there once then.
        "a copy of the table as the head": spec.head_hidden > 0 and len(of_table) == 1,
        "the identity as the head": headless,
    }
    added = "added: " + ", ".join(kind for kind, here in kinds.items() if here)
    return f"{added}; folded: some biases" if spec.write_bias else added


def _work(model: Transformer) -> float:
    return total_fma(model.axis_table(), ACCOUNTINGS["fma"], named_tensors(model))


def _tokens(files: Mapping[str, bytes] | str, path: Path, vocabulary: int) -> int | str:
    """The number of tokens, or why it is not known; UserError if a tokenizer does not fit."""
    if isinstance(files, str):
        return files
    if TOKENIZER not in files:
        return f"the source has no {TOKENIZER}"
    if importlib.util.find_spec("tokenizers") is None:
        return "copied, and not checked: the package tokenizers is not installed"
    found = parse_tokenizer(files[TOKENIZER], str(path / TOKENIZER if is_folder(path) else path))
    found.check_fits(vocabulary, "the model")
    return found.size
