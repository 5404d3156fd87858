"""A comparison of methods as JSON: the results file of controls, which `make tables` reads.

`runs` has every run as a results file of a sweep has it, and what only a comparison knows: its
method, milliseconds, and parameters without the tables of the embedding. `results_schema` has the
schema.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gaugelasso.report.compare import TEST, TESTED, Comparison, Member
from gaugelasso.report.methods import shared_conditions
from gaugelasso.report.results import origin_of, run_result
from gaugelasso.report.run import Run
from gaugelasso.runs.command import command
from gaugelasso.runs.training_work import TRAINING_WORK, entry_in


def compare_results(found: Comparison) -> dict[str, Any]:
    """`runs`, each with its method, and `methods` with their conditions, means and tests."""
    first = found.runs[0]
    data = {
        **origin_of(found.runs),
        "compare_command": command(),
        "task": first.task,
        "metric_name": found.metric_name,
        "metric_lower_is_better": first.metric_lower_is_better,
        "accounting": found.accounting,
        "ms_of": found.ms_of or None,
        "latency": found.latency,
        "against": found.against,
        "test": TEST,
        "runs": [
            {"method": name, "family": found.families[name], **_run_result(found, member)}
            for name, members in found.methods.items()
            for member in members
        ],
        "methods": [
            {
                "method": name,
                "family": found.families[name],
                "seeds": [member.run.seed for member in members],
                "held": [member.held for member in members],
                **{key: _spread(found.values(name, key)) for key in TESTED},
                "p": {key: found.p_value(name, key) for key in TESTED},
                "work_target": _spread(found.work_targets(name)),
                "conditions": shared_conditions([member.run for member in members]),
            }
            for name, members in found.methods.items()
        ],
    }
    return dict(finite(data))


def _run_result(found: Comparison, member: Member) -> dict[str, Any]:
    result = control_result(member.run)
    if not found.counts_training(member.run):
        result[TRAINING_WORK] = None
        if "source" in result:
            result["source"] |= {"training_fma": None}
    return {
        "folder": str(member.run.path),
        **result,
        # In the accounting of the comparison.
        "fma_initial": member.fma_initial,
        "fma_final": member.fma,
        "compression": member.fma_initial / member.fma if member.fma else None,
        "ms": member.ms,
        "held": member.held,
        "work_target": found.work_target(member.run),
        "training_fma": found.training_work(member.run),
    }


def control_result(run: Run) -> dict[str, Any]:
    """A finished run with what tables of methods read, by its own accounting."""
    summary = run.summary or {}
    before, after = run.initial.get("structure", {}), summary["structure"]
    work = entry_in(summary)
    return {
        **run_result(run),
        # Beside `loss`, of the test data: both give that of all held-out data.
        "selection_loss": summary.get("selection_loss"),
        # Of the run and of the runs that it needs: the run's own alone does not compare methods.
        "training_fma": work["total"],
        TRAINING_WORK: work,
        "parameters_initial": summary["parameters_initial"],
        # As CoFi and the paper count them.
        "parameters_without_embedding_initial": _body(summary["parameters_initial"], before),
        "parameters_without_embedding": _body(summary["parameters_final"], after),
        "attentions": _attentions(run),
        # The model that a method began with: its training is a part of the method's work.
        **({"source": _source(summary["source"])} if "source" in summary else {}),
        **({"cofi": summary["cofi"]} if "cofi" in summary else {}),
    }


def _source(source: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("method", "seed", "steps", "fma_final", "loss", "training_fma", "wall_s")
    return {key: source.get(key) for key in keys}


def _body(parameters: float | None, structure: Mapping[str, Any]) -> float | None:
    """Parameters without the tables of tokens and positions; None if the structure has no tables.

    A model of one's own has none that this could know.
    """
    sites, inputs, length = (structure.get(key) for key in ("embed", "inputs", "length"))
    if not (isinstance(sites, list) and isinstance(inputs, int) and isinstance(length, int)):
        return None
    if parameters is None:
        return None
    rows = inputs + (structure.get("input_kind") == "masked_patches")
    rows += length if structure.get("positions") else 0
    return float(parameters - rows * len(sites))


def _attentions(run: Run) -> dict[str, int] | None:
    """How many attentions the model began with, and how many kept all of their d_k and d_v."""
    if run.own_model:
        return None
    before, after = run.initial["widths"], run.widths_at(run.last_step)
    found = [name.removesuffix("d_k") for name in before if name.endswith(".d_k")]
    full = [
        all(after.get(f"{name}{kind}") == before.get(f"{name}{kind}") for kind in ("d_k", "d_v"))
        for name in found
    ]
    return {"initial": len(found), "full_width": sum(full)}


def _spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None
    std = statistics.stdev(present) if len(present) > 1 else None
    return {"mean": statistics.fmean(present), "std": std, "min": min(present), "max": max(present)}


def finite(value: Any) -> Any:
    """The same with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
