"""Compares an imported model with what transformers makes of the same Hugging Face folder.

Needs transformers, which a plain installation does not bring. Runs no code of the folder.
"""

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.errors import UserError, first_line
from gaugelasso.importing.vit import CLASSIFIER, to_patches
from gaugelasso.models import Transformer

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


def compare(folder: Path, architecture: str, model: Transformer) -> Difference | str:
    """Outputs for random inputs in float32, or why they are not compared; UserError if they differ.

    A difference means that the folder has a setting that the import does not know.
    """
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    try:
        expected, inputs = _of_transformers(folder, architecture, model)
    # Whatever another library raises for a model that it cannot load.
    except Exception as error:
        return f"transformers cannot load it ({type(error).__name__}: {first_line(error)})"
    training = model.training
    with torch.inference_mode():
        # In training mode the model would measure the energies of these inputs.
        found = model.eval()(inputs)
    model.train(training)
    if architecture == CLASSIFIER:  # by the class token
        found = found[:, 0]
    difference = Difference(float((found - expected).abs().max()), float(expected.std()))
    if not difference.share <= _LARGEST:
        raise UserError(
            f"{str(folder)!r}: the outputs differ by {difference} from those of transformers, so "
            "nothing was written; the model has something that is not known here"
        )
    return difference


def _of_transformers(folder: Path, architecture: str, model: Transformer) -> tuple[Tensor, Tensor]:
    """Its outputs, and the inputs for the model here."""
    import transformers
    from transformers.utils import logging

    how = _AS.get(architecture, _CAUSAL)
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it lists the tensors of other heads
    try:
        theirs = getattr(transformers, how.kind).from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **how.options,
        )
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
    given, inputs = _inputs(model, theirs.config)
    with torch.inference_mode():
        return getattr(theirs.eval()(given), how.output), inputs


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
