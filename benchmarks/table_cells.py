"""The figures of a row of results/README.md, made from the runs of a results file.

A figure that a run does not have is a dash.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gaugelasso.report.formats import DASH, count, figure, milliseconds, ratio, short

Runs = Sequence[Mapping[str, Any]]
Key = Callable[[Any], float | None]
Form = Callable[[float], str]
Cell = Callable[[Runs], str]


# --- runs ----------------------------------------------------------------------------------


def outcome_of(run: Mapping[str, Any]) -> str:
    """As in the paper: converged with 99% exact match at less than half of the work."""
    if (compression_of(run) or 1) < 2:
        return "never compressed"
    return "converged" if (run["metric"] or 0) >= 0.99 else "not converged"


def converged_share(runs: Runs) -> str:
    """How many of all runs converged; a dash for training that has no target to compress to."""
    if all("held" in run and run["held"] is None and "method" in run for run in runs):
        return DASH
    return f"{sum(outcome_of(run) == 'converged' for run in runs)}/{len(runs)}"


def missed_share(runs: Runs) -> str:
    """How many of the runs missed their target, for the end of a row; empty if none did."""
    missed = sum(run.get("held") is False for run in runs)
    return f"{missed} of {len(runs)} missed the target" if missed else ""


def compression_of(run: Mapping[str, Any]) -> float | None:
    """None if a results file does not say where a run began."""
    if run.get("compression") is not None:
        return float(run["compression"])
    return _ratio(run.get("fma_initial"), run["fma_final"])


def _steps(run: Mapping[str, Any]) -> float | None:
    """With those of the full model, for a method that begins with a trained one."""
    own, before = run.get("steps"), (run.get("source") or {}).get("steps", 0)
    return None if own is None or before is None else own + before


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _held_out_loss(run: Mapping[str, Any]) -> float | None:
    """The loss of all held-out data: of both halves, or as early runs have it, which split none."""
    test, selection = run["loss"], run.get("selection_loss")
    return test if test is None or selection is None else (test + selection) / 2


def _perplexity(run: Mapping[str, Any]) -> float | None:
    return None if (loss := _held_out_loss(run)) is None else math.exp(loss)


def _cofi(name: str) -> Key:
    return lambda run: (run.get("cofi") or {}).get(name)


def _mask(family: str) -> Key:
    return lambda run: (run.get("cofi") or {}).get("masks", {}).get(family)


def _requested(run: Mapping[str, Any]) -> float | None:
    return _ratio(_full_cost(run), _cofi("target")(run))


def _reached(run: Mapping[str, Any]) -> float | None:
    """By the objective of CoFi; by work for a run without one."""
    return _ratio(_full_cost(run), _cofi("reached")(run) or run["fma_final"])


def _full_cost(run: Mapping[str, Any]) -> float | None:
    """What the full model costs by the objective of CoFi: work, or parameters."""
    by_parameters = (run.get("cofi") or {}).get("objective") == "parameters"
    return run.get("parameters_without_embedding_initial" if by_parameters else "fma_initial")


# --- cells ---------------------------------------------------------------------------------


def _mean(key: Key, form: Form) -> Cell:
    def cell(runs: Runs) -> str:
        values = [value for run in runs if (value := key(run)) is not None]
        if not values or len(values) < len(runs):
            return DASH
        spread = f" ± {form(statistics.stdev(values))}" if len(values) > 1 else ""
        return form(statistics.fmean(values)) + spread

    return cell


def _median(key: Key, form: Form, wide: bool = True) -> Cell:
    def cell(runs: Runs) -> str:
        values = [value for run in runs if (value := key(run)) is not None]
        if not values:
            return DASH
        never = f"; {len(runs) - len(values)} never" if len(values) < len(runs) else ""
        middle = form(statistics.median(values))
        if wide and len(values) > 1:
            middle += f" [{form(min(values))}, {form(max(values))}]"
        return middle + never

    return cell


def _range(key: Key, form: Form) -> Cell:
    def cell(runs: Runs) -> str:
        values = [value for run in runs if (value := key(run)) is not None]
        if not values or len(values) < len(runs):
            return DASH
        return f"{form(min(values))}–{form(max(values))}"

    return cell


def _before(name: str) -> Key:
    return lambda run: (run.get("before_cooldown") or {}).get(name)


def _full_width(runs: Runs) -> str:
    """Attentions with their initial d_k and d_v, of all."""
    found = [f"{a['full_width']} of {a['initial']}" for run in runs if (a := run.get("attentions"))]
    return ", ".join(found) if found and len(found) == len(runs) else DASH


def _score(value: float) -> str:
    return f"{value:.5f}"


def _in_1e11(value: float) -> str:
    return f"{value / 1e11:.2f}e11"


def _signed(value: float) -> str:
    return f"{value:+.2g}"


def speed(curve: Mapping[str, Any]) -> str:
    """Milliseconds of a step at the begin and the end of a run, and how many times faster it is."""
    # The first point includes the start of the run.
    times = [ms for ms in curve["step_ms"][1:] if ms is not None]
    if not times:
        return DASH
    first, last = (statistics.median(part) for part in (times[:5], times[-5:]))
    work = _ratio(curve["fma_initial"], curve["fma_final"]) or 1.0
    faster = f"{ratio(first / last)} at {ratio(work)} less work"
    return f"{milliseconds(first)} to {milliseconds(last)}, {faster}"


CELLS: dict[str, Cell] = {
    "runs": lambda runs: str(len(runs)),
    "held": lambda runs: str(sum(bool(run.get("held")) for run in runs)),
    "steps": _mean(_steps, count),
    "steps_median": _median(_steps, count, wide=False),
    "fma": _mean(lambda run: run["fma_final"], short),
    "fma_median": _median(lambda run: run["fma_final"], short),
    "compression": _mean(compression_of, ratio),
    "compression_median": _median(compression_of, ratio, wide=False),
    "compression_median_range": _median(compression_of, ratio),
    "loss": _mean(lambda run: run["loss"], figure),
    "held_out_loss": _mean(_held_out_loss, figure),
    "loss_range": _range(lambda run: run["loss"], lambda value: f"{value:.2g}"),
    "metric": _mean(lambda run: run["metric"], _score),
    "metric_median": _median(lambda run: run["metric"], _score, wide=False),
    "perplexity": _mean(_perplexity, "{:.3f}".format),
    "parameters": _mean(lambda run: run.get("parameters_without_embedding"), short),
    "reached": _median(lambda run: run.get("target_reached_step"), count),
    "training_median": _median(lambda run: run["training_fma"], _in_1e11, wide=False),
    "before_loss": _mean(_before("loss"), figure),
    "before_metric": _mean(_before("metric"), _score),
    "before_fma": _mean(_before("fma"), short),
    "step_ms": _mean(lambda run: run["ms"], milliseconds),
    "cofi_requested": _mean(_requested, ratio),
    "cofi_reached": _mean(_reached, ratio),
    "full_width": _full_width,
    **{
        f"mask_{family}": _mean(_mask(family), "{:.3f}".format)
        for family in ("mha", "head", "hidden", "ffn", "intermediate")
    },
    "lambda_1": _mean(_cofi("lambda_1"), "{:.3g}".format),
    "lambda_2": _mean(_cofi("lambda_2"), "{:.3g}".format),
    "lambda_1_rate": _mean(_cofi("lambda_1_per_1000_steps"), _signed),
}  # fmt: skip
