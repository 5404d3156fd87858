"""Values that follow from the rest of a config, where `target.loss` is that of the final model.

A model with the weights of another has a lower learning rate. Its channels go by their measured
harm, and it is distilled from the one that it was.

A run that follows a course needs no numbers of its own for rate, interval, warm-up and anneal. A
key that is in the config stays.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gaugelasso.compress.courses.stages import ANNEAL, LEAST_RATE, LEAST_STEPS, default_warmup
from gaugelasso.compress.defaults import default_interval, default_lr
from gaugelasso.config.sections import TrainConfig
from gaugelasso.errors import UserError

# The share of distillation for pretrained weights.
DISTILL = 0.5


def course_defaults(tables: Mapping[str, Any], sizes: Callable[[], list[int]]) -> dict[str, Any]:
    """The [compress] and [train] sections, with the missing keys filled in.

    `sizes` gives the numbers of elements of the model's weight matrices, for a missing rate.
    Values of a wrong type are left to the sections' own checks.
    """
    compress, train = tables["compress"], tables["train"]
    if not isinstance(compress, Mapping) or not isinstance(train, Mapping):
        return {}
    steps = train.get("steps", TrainConfig.steps)
    model = tables.get("model")
    pretrained = isinstance(model, Mapping) and "from" in model
    lr = compress["lr"] if "lr" in compress else default_lr(sizes(), pretrained)
    if not isinstance(steps, int) or not isinstance(lr, int | float):
        return {}
    if steps < LEAST_STEPS:
        raise UserError(
            f"train.steps = {steps}: a final loss needs at least {LEAST_STEPS} steps; raise it, or "
            "set target.hold = 'pressed'"
        )
    course = {
        "warmup": default_warmup(steps),
        "cooldown": round(ANNEAL * steps),
        "lr_min": LEAST_RATE * lr,
        "log_every": min(TrainConfig.log_every, max(1, steps // 50)),
    }
    removal = {"removal": "harm"} if pretrained else {}
    distill = {"distill": DISTILL} if pretrained else {}
    return {
        "compress": {"lr": lr, "interval": default_interval(steps), **removal, **compress},
        "train": {**course, **distill, **train},
    }
