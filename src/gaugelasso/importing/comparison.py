"""Compares an imported model with what transformers makes of the same folder or GGUF file.

Needs transformers, and for a GGUF file the package gguf, which a plain installation does not bring.
Runs no code of the source.
"""

import contextlib
import importlib.util
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.errors import UserError, first_line
from gaugelasso.importing.source import Source
from gaugelasso.importing.vit import CLASSIFIER, to_patches
from gaugelasso.models import Transformer
from gaugelasso.runs.reading import is_folder

# Sequences, and tokens of each: logits of a large vocabulary take much memory.
_BATCH, _LENGTH = 3, 32
# Of the standard deviation of the outputs: above what float32 rounds in a deep model.
_LARGEST = 1e-3


@dataclass(frozen=True)
class _Loaded:
    """The class of transformers that loads an architecture, its outputs, and options for it."""

    kind: str = "AutoModelForCausalLM"
    output: str = "logits"
    options: dict[str, Any] = field(default_factory=dict)


_CAUSAL = _Loaded()
_STATES = _Loaded("AutoModel", "last_hidden_state")
_NO_POOLER = replace(_STATES, options={"add_pooling_layer": False})
_MASKED = _Loaded("AutoModelForMaskedLM")
_AS = {
    "BertModel": _NO_POOLER,
    "BertForMaskedLM": _MASKED,
    "RobertaModel": _NO_POOLER,
    "RobertaForMaskedLM": _MASKED,
    "DistilBertModel": _STATES,
    "DistilBertForMaskedLM": _MASKED,
    "ViTModel": _NO_POOLER,
    CLASSIFIER: _Loaded("AutoModelForImageClassification"),
}


@dataclass(frozen=True)
class Difference:
    """The largest difference of two outputs, and the standard deviation of the source's."""

    largest: float
    spread: float

    @property
    def share(self) -> float:
        return self.largest / self.spread if self.spread else float("inf")

    def __str__(self) -> str:
        return f"{self.largest:.2g} ({self.share:.1g} of their standard deviation)"


@dataclass(frozen=True)
class Reference:
    """The source as transformers has loaded it, in float32; `output` names what it returns."""

    model: Any
    output: str

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        found: Tensor = getattr(self.model(inputs), self.output)
        return found


def load_reference(source: Source) -> Reference | str:
    """What transformers makes of the source, or why nothing."""
    in_file = not is_folder(source.path)
    for package in ("transformers", "gguf") if in_file else ("transformers",):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if in_file and _has_scaled_rope(source):
        return "transformers leaves out the scaling of RoPE in a GGUF file"
    how = _AS.get(source.architecture, _CAUSAL)
    try:
        found = Reference(_load(source.path, in_file, how), how.output)
    # Whatever another library raises for a model that it cannot load.
    except Exception as error:
        return f"transformers cannot load it ({type(error).__name__}: {first_line(error)})"
    width = source.settings.table.get(f"{source.architecture}.attention.key_length")
    theirs = getattr(found.model.config, "head_dim", None)
    if in_file and None not in (width, theirs) and width != theirs:
        return f"transformers takes {theirs} for the width of a head, the file has {width}"
    return found


def compare(source: Source, reference: Reference, model: Transformer) -> Difference:
    """Outputs for random inputs in float32; UserError if they differ.

    A difference means that the source has a setting that the import does not know.
    """
    given, inputs = _inputs(model, reference.model.config)
    expected, training = reference(given), model.training
    with torch.inference_mode():
        # In training mode the model would measure the energies of these inputs.
        found = model.eval()(inputs)
    model.train(training)
    if source.architecture == CLASSIFIER:  # by the class token
        found = found[:, 0]
    difference = Difference(float((found - expected).abs().max()), float(expected.std()))
    if not difference.share <= _LARGEST:
        raise UserError(
            f"{str(source.path)!r}: the outputs differ by {difference} from those of transformers, "
            "so nothing was written; the model has something that is not known here"
        )
    return difference


def _has_scaled_rope(source: Source) -> bool:
    keys = (key.partition(".")[2] for key in source.settings.table)
    scaled = any(key.startswith("rope.scal") for key in keys)
    return scaled or "rope_freqs.weight" in source.shapes


def _load(path: Path, in_file: bool, how: _Loaded) -> Any:
    import transformers
    from transformers.utils import logging

    # Of a file with the settings inside, no other file of its folder is read.
    place = (
        (path.parent, {"gguf_file": path.name}) if in_file else (path, {"use_safetensors": True})
    )
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it lists the tensors of other heads
    try:
        # The bar of a GGUF file is shown whatever was disabled.
        with contextlib.redirect_stderr(io.StringIO()):
            found = getattr(transformers, how.kind).from_pretrained(
                place[0],
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                **place[1],
                **how.options,
            )
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
    return found.eval()


def _inputs(model: Transformer, config: Any) -> tuple[Tensor, Tensor]:
    """Random inputs for transformers, and the same for the model here."""
    spec, generator = model.spec(), torch.Generator().manual_seed(0)
    if spec.input_kind == "tokens":
        size = (_BATCH, min(spec.length, _LENGTH))
        tokens = torch.randint(spec.inputs, size, generator=generator)
        if config.model_type == "roberta":  # where a padding token shifts all positions after it
            tokens[tokens == config.pad_token_id] += 1 if config.pad_token_id == 0 else -1
        return tokens, tokens
    shape = (_BATCH, config.num_channels, config.image_size, config.image_size)
    images = torch.randn(shape, generator=generator)
    return images, to_patches(images, config.patch_size)
