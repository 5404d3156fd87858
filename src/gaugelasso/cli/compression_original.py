"""The figures of the original, the model that `compress` begins with."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from gaugelasso.cli.compression_options import Share
from gaugelasso.cli.compression_plan import Plan
from gaugelasso.distributed import ALONE
from gaugelasso.errors import UserError
from gaugelasso.runs.reading import read_json
from gaugelasso.runs.writing import write_json
from gaugelasso.tasks import SELECTION, TEST
from gaugelasso.training.evaluation import configure_cpu_, evaluate, final_evaluation
from gaugelasso.training.opening import check_data


@dataclass(frozen=True)
class Figures:
    """The loss in nats, and the metric of the task in bits."""

    loss: float
    bits: float


@dataclass(frozen=True)
class Original:
    """The figures of the original on selection data and on test data.

    `during` are its bits on the selection data of an evaluation during the run.
    """

    selection: Figures
    test: Figures
    during: float
    metric: str

    @classmethod
    def load(cls, path: Path) -> "Original":
        data = read_json(path)
        try:
            selection, test = (Figures(**data[key]) for key in ("selection", "test"))
            during, metric = data["during"], data["metric"]
            numbers = (during, selection.loss, selection.bits, test.loss, test.bits)
            if not all(isinstance(n, float) and n > 0 for n in numbers):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{str(path)!r}: not the figures of an original; start again with --overwrite"
            ) from None
        return cls(selection, test, during, str(metric))

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    def describe(self, unit: str) -> str:
        """All figures; `unit` is that of the loss."""
        selection, test = self.selection, self.test
        return (
            f"{selection.loss:.4f} {unit}, {selection.bits:.4f} {self.metric} on selection "
            f"data; {test.loss:.4f} and {test.bits:.4f} on test data"
        )


def measure_original(chosen: Plan, device: str) -> Original:
    """Measure it as the run measures its own model."""
    config = chosen.config
    check_data(config, device)
    configure_cpu_(config, device)
    model = config.model.build(config.task, config.train.seed).to(device)
    selection, test = (
        final_evaluation(model, config, device, ALONE, stream) for stream in (SELECTION, TEST)
    )
    during = evaluate(model, config, config.train.eval_batches, device)
    return Original(
        Figures(selection.loss, selection.metric),
        Figures(test.loss, test.metric),
        during.metric,
        config.task.metric_name,
    )


def named_loss(original: Original, share: Share, chosen: Plan) -> float:
    """The loss that lies a share above the original's; UserError if nothing can be named so."""
    loss, guess = original.selection.loss, math.log(chosen.task.inputs)
    if not 0 < loss < math.inf or not 0 < original.test.loss < math.inf:
        raise UserError(
            f"the original's loss is {loss:g} on selection data and {original.test.loss:g} on test "
            "data, so no share of it can be named; check MODEL and --data"
        )
    named = round((1 + share.value) * loss, 6)
    if named >= guess:
        raise UserError(
            f"--above-original {share.text} names a loss of {named:.4g} = {1 + share.value:.4g} x "
            f"{loss:.4g} {chosen.task.loss_unit}; guessing among {chosen.task.inputs:,} tokens has "
            f"{guess:.4g}, so any model would hold it: lower the share, or check that MODEL and "
            "--data belong together"
        )
    return named
