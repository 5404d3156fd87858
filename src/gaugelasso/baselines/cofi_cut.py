"""Makes masks dense: folds those that stay into the weights, and cuts the rest by surgery.

Heads are on no axis of the table, because compression keeps their number. Here they get one for a
single cut.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gaugelasso.axes import Axis, AxisTable, Slot, named_tensors
from gaugelasso.baselines.cofi_masks import Masks
from gaugelasso.compress.drop import Decision, cascade
from gaugelasso.compress.model_state import ModelState
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.models.operators import Attention


def make_dense_(state: ModelState, masks: Masks) -> Decision:
    """Give the model its deterministic masks and remove what they close; returns what was cut."""
    model = state.model
    assert isinstance(model, Transformer)
    values = masks.deterministic()
    keeps = {name: torch.ones(size, dtype=torch.bool) for name, size in state.widths().items()}
    heads: dict[str, Tensor] = {}
    by = {(part.family, part.owner): part.of(values).cpu() > 0 for part in masks.parts}
    for (family, owner), kept in by.items():
        if family == "hidden":
            keeps["D"] &= kept
        elif family == "head":
            heads[owner] = kept & by["mha", owner]
            keeps[f"{owner}.d_v"] &= heads[owner].any()
        elif family == "intermediate":
            keeps[f"{owner}.d_f"] &= kept & by["ffn", owner]
    decision = cascade(state.table, state.readable(), keeps)
    if decision is None:
        raise UserError("the masks of CoFi close every path through the model; raise the target")
    _fold_(model, masks, values)
    state.table = with_heads(model, state.table)
    cut = dict(decision.keeps)
    for owner, kept in heads.items():
        alive = owner not in decision.removed
        groups = kept if alive else torch.zeros_like(kept)
        attention = model.get_submodule(owner)
        assert isinstance(attention, Attention)
        cut[f"{owner}.groups"] = groups
        shared = attention.query.shape[1] // attention.key.shape[1]
        cut[f"{owner}.heads"] = groups.repeat_interleave(shared)
    whole = Decision(cut, decision.removed)
    state.cut_(whole, "where masks are made dense")
    return whole


@torch.no_grad()
def _fold_(model: Transformer, masks: Masks, values: Tensor) -> None:
    tensors = named_tensors(model)
    for name, value in masks.gated(model, values).items():
        tensors[name].copy_(value)


def with_heads(model: Transformer, table: AxisTable) -> AxisTable:
    """The table with two more axes for each attention: its query heads, and its key heads."""
    axes, free = list(table.axes), set()
    for name, operator in model.operators.items():
        if not isinstance(operator, Attention):
            continue
        owner = f"operators.{name}"
        out = Slot(f"{owner}.out")
        query, key, value = (
            tuple(slot for slot in table.fixed if slot in _heads_of(owner, leaf))
            for leaf in ("query", "key", "value")
        )
        axes.append(Axis(f"{owner}.heads", "heads", query, (out,), owner=owner))
        axes.append(Axis(f"{owner}.groups", "groups", key, value, owner=owner))
        free |= {*query, *key, *value, out}
    fixed = tuple(slot for slot in table.fixed if slot not in free)
    return replace(table, axes=tuple(axes), fixed=fixed)


def _heads_of(owner: str, leaf: str) -> tuple[Slot, ...]:
    """The dims of heads of a map and of its bias, which not every model has."""
    return Slot(f"{owner}.{leaf}", 1), Slot(f"{owner}.{leaf}_bias", 0)
