"""Rebuilding: a cut model, built again from its structure, computes the same.

A checkpoint is loaded in this way. A number that the constructor derives from a width, such as a
softmax scale, is another one after a cut, and no shape shows it.
"""

import copy
import json

from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors, width
from gaugelasso.checking.cut import some_dropped
from gaugelasso.checking.result import Finding, failed, noted, passed
from gaugelasso.checking.subject import TOLERANCE, Subject, difference, reason
from gaugelasso.compress.surgery import cut_


def check_rebuild(subject: Subject) -> list[Finding]:
    """A finding for each axis that can be cut; a note alone if even the uncut model is not built.

    A loop without a run folder needs no `from_structure`, and a run folder refuses such a model
    at the start. What is built at first and not after a cut is found when it is too late.
    """
    whole = subject.exact()
    try:
        _rebuilt(whole)
    except Exception as error:
        message = f"from_structure(structure()) does not build the model: {reason(error)}"
        need = "load_model and a run folder need it"
        return [noted("rebuild", type(whole).__name__, f"{message}; {need}")]
    findings = []
    for axis in whole.axis_table().axes:
        decision = some_dropped(whole, axis) if width(axis, named_tensors(whole)) > 1 else None
        if decision is None:
            continue
        model = copy.deepcopy(whole)
        try:
            cut_(model, model.axis_table(), decision.keeps, decision.removed)
            before = subject.output(model)
        except Exception:  # a finding of `check_cuts` already
            continue
        findings.append(_compared(subject, model, before, axis.name))
    return findings


def _rebuilt(model: Compressible) -> Compressible:
    """As a checkpoint does it, which has every buffer, also one that `state_dict` leaves out."""
    again = type(model).from_structure(json.loads(json.dumps(model.structure())))
    # Of the same dtype and device first, so that no weight is rounded.
    here, there = named_tensors(again.to(next(model.parameters()))), named_tensors(model)
    if here.keys() != there.keys():
        raise ValueError(f"tensor {min(here.keys() ^ there.keys())!r} is in one of them alone")
    for name, tensor in here.items():
        if tensor.shape != there[name].shape:
            shapes = tuple(tensor.shape), tuple(there[name].shape)
            raise ValueError("tensor {!r} is {}, not {}".format(name, *shapes))
        tensor.copy_(there[name])
    return again.eval()


def _compared(subject: Subject, model: Compressible, before: Tensor, name: str) -> Finding:
    """Compare a cut model with the one that is built from its structure."""
    try:
        change = difference(subject.output(_rebuilt(model)), before)
    except Exception as error:
        return failed("rebuild", name, "from_structure(structure()) does not build a model that "
                      f"has lost indices of this axis: {reason(error)}; structure() must describe "
                      "every width")  # fmt: skip
    if change <= TOLERANCE:
        return passed("rebuild", name, "a checkpoint of a cut model can be loaded")
    return failed("rebuild", name, "a cut model that from_structure(structure()) builds has other "
                  f"outputs, by {change:.1g}; put every number that the forward pass uses into "
                  "structure() or a buffer (usual cause: a scale that the constructor computes "
                  "from a width)")  # fmt: skip
