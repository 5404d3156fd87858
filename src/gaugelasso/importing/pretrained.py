"""How compression treats pretrained weights: differently from those of a fresh network."""

from collections.abc import Callable
from dataclasses import replace

from gaugelasso.errors import errors_of
from gaugelasso.importing.source import Source
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.structures import check_fits_memory

# Outputs of a head from which on its Newton-Schulz iteration is a large part of an update.
_LARGE_VOCABULARY = 2**14


def for_pretrained(spec: TransformerSpec) -> TransformerSpec:
    """The structure, to be filled with pretrained weights. Its outputs are the same.

    - A few sites and tokens carry nearly all of the energy of a pretrained stream, so energies are
      taken by token.
    - A batch contains few tokens of a large vocabulary, and the rows of the others stay as they
      are.
    - A head of a large vocabulary takes the elementwise step.
    """
    large = spec.outputs >= _LARGE_VOCABULARY
    return replace(
        spec,
        norm_energy="token",
        unseen_rows="held",
        head_step="elementwise" if large else spec.head_step,
    )


def unfilled(source: Source, spec_of: Callable[[], TransformerSpec]) -> Transformer:
    """The model of a source, to be filled with its weights.

    UserError if its sizes make no structure, or one that does not fit the memory.
    """
    with errors_of(source.settings.path):
        spec = for_pretrained(spec_of())
    check_fits_memory(spec, source.path)
    return Transformer(spec)
