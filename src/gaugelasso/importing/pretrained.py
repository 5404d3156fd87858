"""How compression treats pretrained weights: differently from those of a fresh network."""

from dataclasses import replace

from gaugelasso.models import TransformerSpec

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
