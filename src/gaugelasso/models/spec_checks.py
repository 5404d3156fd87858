"""Checks of single parts of a structure; each raises SpecError with what would be right."""

from typing import TYPE_CHECKING, Any

from gaugelasso.models.json_fields import SpecError, shown

if TYPE_CHECKING:
    from gaugelasso.models.spec import TransformerSpec

# Larger than any machine can hold, and small enough for an int64 tensor.
LARGEST = 2**40


def check_tied(spec: "TransformerSpec") -> None:
    """The table of tokens is a map to the outputs."""
    if not spec.tied_head:
        if spec.tied_mean:
            raise SpecError("tied_mean needs tied_head: a head of its own has its means")
        return
    if spec.post_norm or spec.head_hidden:
        raise SpecError("tied_head: an encoder's head has a map of its own")
    if spec.input_kind != "tokens" or spec.inputs != spec.outputs:
        raise SpecError(
            f"tied_head: a table of {spec.inputs} {spec.input_kind} is no map to "
            f"{spec.outputs} outputs; it needs as many tokens as outputs"
        )
    if len(spec.embed) != len(spec.classify):
        raise SpecError(
            f"tied_head: the embedding writes {len(spec.embed)} sites and the classifier reads "
            f"{len(spec.classify)}; each has one for every column of the table"
        )


def check_encoder(spec: "TransformerSpec") -> None:
    """What follows from `post_norm` and `head_hidden`."""
    if spec.post_norm and spec.causal:
        raise SpecError("post_norm = True needs causal = False: such a decoder is not built")
    if spec.post_norm and spec.norm != "slow":
        raise SpecError(f"post_norm = True needs norm = 'slow', not {spec.norm!r}")
    if spec.head_hidden:
        positive("head_hidden", spec.head_hidden)
        if spec.mlp == "swiglu":
            raise SpecError("head_hidden needs an mlp with GELU, not 'swiglu'")


def positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name} = {value!r}: must be a whole number of at least 1")
    if value > LARGEST:
        raise SpecError(f"{name} = {shown(value)}: must be at most {LARGEST}")


def check_reach(who: str, sites: tuple[int, ...], width: int) -> None:
    positive(f"{who}: number of sites", len(sites))
    for site in sites:
        if not isinstance(site, int) or not 0 <= site < width:
            raise SpecError(f"{who}: site {site!r} is outside 0..{width - 1}")
    if len(set(sites)) != len(sites):
        raise SpecError(f"{who}: a site appears twice")
