"""The [train] section."""

import math
from dataclasses import dataclass
from typing import Literal

from gaugelasso.config.model import check_range
from gaugelasso.errors import UserError


@dataclass(frozen=True)
class TrainConfig:
    """[train]: length and phases, batches, device, evaluation, logging and checkpoints."""

    seed: int = 42
    steps: int = 30_000
    warmup: int = 500
    cooldown: int = 5_000
    saturation: int = 0
    lr_min: float = 1e-4
    batch: int = 32
    accumulate: int = 1
    canonical: bool = False
    distill: float = 0.0
    teacher: str = ""
    teacher_precision: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    graph: bool = True
    fused: bool = True
    probe: bool = True
    log_every: int = 50
    eval_every: int = 1_000
    eval_batches: int = 8
    final_batches: int = 64
    checkpoint_every: int = 1_000
    patience: int = 1_000
    skip_limit: int = 20
    checkpoint_keep: int = 2
    threads: int = 0  # 0: the default of torch
    rank_timeout: int = 20

    def __post_init__(self) -> None:
        for key in ("steps", "batch", "accumulate", "log_every", "eval_every", "eval_batches",
                    "skip_limit", "final_batches", "checkpoint_every"):  # fmt: skip
            check_range(f"train.{key}", getattr(self, key), 1, 10**9)
        # With a single checkpoint, a damaged one could not be replaced by an older one.
        check_range("train.checkpoint_keep", self.checkpoint_keep, 2, 10**9)
        check_range("train.threads", self.threads, 0, 1024)
        check_range("train.rank_timeout", self.rank_timeout, 1, 86_400)
        for key in ("seed", "warmup", "cooldown", "saturation", "patience"):
            check_range(f"train.{key}", getattr(self, key), 0, 2**62)
        if not 0 <= self.lr_min < math.inf:
            raise UserError(f"train.lr_min = {self.lr_min}: must be a finite number of 0 or more")
        if not 0 <= self.distill <= 1:
            raise UserError(f"train.distill = {self.distill}: must be in [0, 1]")
        if self.warmup + self.cooldown > self.steps:
            raise UserError(
                f"train.warmup = {self.warmup} and train.cooldown = {self.cooldown} do not fit "
                f"into train.steps = {self.steps}: no step is left for compression"
            )
