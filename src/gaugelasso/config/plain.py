"""Plain training with the settings of a run: no pressure, warm-up and one anneal."""

from dataclasses import replace

from gaugelasso.config import Config
from gaugelasso.config.target import TargetConfig
from gaugelasso.runs.targets import ANY_LOSS

# The keys that plain training takes from the run, beside those of [target].
PLAIN_KEYS = ("train.steps", "train.warmup", "train.cooldown", "train.saturation")
# The keys that only pressure, or an event that follows from it, gives an effect.
PRESSURE_KEYS = (
    "compress.solver", "compress.rho", "compress.removal", "compress.shape", "compress.trust",
    "compress.drop_tolerance", "compress.split_share", "compress.exchange",
    "compress.penalty", "compress.calibration", "compress.coupling", "compress.loss_smoothing",
    "train.patience",
)  # fmt: skip
# The keys of events that post-hoc pruning uses too: how it balances, cuts and probes.
BALANCE_KEYS = ("compress.sinkhorn_sweeps", "compress.anchor", "compress.powers_of_two")
EVENT_KEYS = (*BALANCE_KEYS, "compress.multiple", "train.probe")


def plain(config: Config, steps: int, cooldown: int) -> Config:
    """The config of plain training, with so many steps and so long an anneal."""
    warmup = min(config.train.warmup, steps)
    cooldown = min(cooldown, steps - warmup)
    return replace(
        config,
        # Pressed: the plain schedule, without trial anneals and returns.
        # A run that misses its target goes back and anneals again, and plain training has the run's
        # number of steps and no more.
        target=TargetConfig(loss=ANY_LOSS, hold="pressed"),
        compress=replace(
            config.compress, solver="fixed", rho=0.0, removal="pressure", shape="free"
        ),
        train=replace(config.train, steps=steps, warmup=warmup, cooldown=cooldown, saturation=0),
    )
