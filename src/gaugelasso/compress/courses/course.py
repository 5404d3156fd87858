"""The course of a run: how hard to press, and at which rate, to end at the loss that was named.

Under pressure at a full learning rate the loss is far above that of the same model after an
anneal. How far depends on the task, so the course measures it. It presses towards a provisional
loss, anneals for a short time without pressure (a trial), and compares. A trial that leads to the
target loss sets how loosely to press next. One that does not sends the run back to the last
state that did. The rest of the run is one long anneal, pressed to its last step.

                 start      trial  press  trial  press  trial        anneal
    rate       /--------\\ ____/------\\____/------\\____/----.._____________
    pressure    --------        ------      ------      ------------------

Decides by numbers alone: knows nothing of models, files or data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from gaugelasso.compress.amounts import amount
from gaugelasso.compress.courses.stages import TRIAL, Stages
from gaugelasso.compress.events import CUT_SHARE

# The first provisional loss is the geometric mean of the first loss and the target, but at
# most this share of the way from the target loss up to the first. A later one is at most `WAY` of
# the way, and at most `GROWTH` times the loss before the trial.
FIRST_WAY, WAY, GROWTH = 0.1, 0.2, 4.0
# The long anneal lowers the loss further than a trial: by this share of what the trial did, on a
# logarithmic scale, and by at most `MOST_FURTHER`.
FURTHER, MOST_FURTHER = 0.7, 1.4
# What the model learns before that, in as many steps as the long anneal has, lowers the loss too.
LATER = 0.15
# A trial that misses by at most this share of its fall more does not send the run back if another
# trial follows: the next press is tighter, and the model learns on at its size.
PATIENCE = 0.15
# A looser press makes the model smaller, and the fall of a smaller model is less: the loss after a
# trial grows about as the square of the loss before it. So a provisional loss follows what a trial
# missed, or had to spare, by this power.
STEP = 0.5
# After a trial that failed, the provisional loss is at most and at least these shares of the one
# that it was.
TIGHTER, TIGHTEST = 0.7, 0.5
# In the last anneal the pressed loss starts above the final one: by this share of the last trial's
# fall, on a logarithmic scale, and by at most `MOST_ABOVE`. Less than the fall that is expected,
# because that of a smaller model is less.
ABOVE, MOST_ABOVE = 0.7, 1.5
# An event may raise the loss by this share of the pressed loss, and by this share of the way from
# the first loss down to it: the second matters for losses that never come near zero.
EVENT_SHARE, EVENT_WAY = 0.1, 0.01
# The same for channels that go by their harm, where the first loss of a pretrained model is no
# bound.
HARM_SHARE = 0.005
# Over the last share of the steps, wherever the loss on selection data is too high, pressure waits
# until the training loss is below this share of what is aimed at.
LANDING, RELEASED = 0.1, 0.8
# So it does in the last anneal if nothing was cut for this share of all steps: pressure that cuts
# nothing only keeps the loss up. Fewer steps than `LEAST_STALL` have too few events to tell.
STALLED, LEAST_STALL = 0.05, 50
# A loss before a trial that is above the pressed one by more than this factor is that of a spike.
SPIKE = 2.0
# States have about the same size up to this ratio of their work.
NEAR = 1.25

# What follows a trial that did not reach the target loss. Without a figure: how far the loss falls
# after an early trial is not known.
_LAST_ANNEAL = "the last anneal follows, which is longer and lowers the loss further"
_NORMAL = "so a larger model goes on and is cut more carefully, as is normal after such a trial"

# Measures the present model on selection data: on all of them (True), or on a part.
Measure = Callable[[bool], float]


@dataclass(frozen=True)
class Answer:
    """What a course wants done now: keep the present state, or return to one that was kept."""

    keep: bool = False
    return_to: int | None = None
    reason: str = field(default="", compare=False)


@dataclass
class Course(Stages):
    """Gives `rate` and `pressed_loss` of each step, and takes in the losses after it.

    `due(step)` says after which steps to call `advance`. Fields that end in `_at` are steps.
    """

    growth: ClassVar[float] = GROWTH

    @property
    def cut_share(self) -> float:
        """The share of the work that an event may cut, where channels go by their harm."""
        return CUT_SHARE

    # --- before a step --------------------------------------------------------------------

    def pressed_loss(self, step: int) -> float | None:
        """The loss that a step presses towards; None for a step without pressure."""
        if step < self.warmup or self.stage == "trial" or self.first_loss is None:
            return None
        if self.stage != "anneal":
            return self.provisional or self._first_provisional(self.first_loss)
        room = max(self.gap or 0.0, 0.0)
        if self.named <= 0:  # a loss that can be negative has no logarithm, and no shares
            return None if self.released else self.aim - room
        if self.released:
            return max(RELEASED * self.aim - room, 0.3 * self.named)
        above = math.exp(min(ABOVE * max(self.fall, 0.0), MOST_ABOVE) * self._share(step))
        return max(self.aim - room, 0.3 * self.named) * above

    def allowance(self, pressed_loss: float) -> float:
        """How much one structural event may raise the loss of its batch."""
        if self.by_harm:
            return HARM_SHARE * abs(pressed_loss)
        way = (self.first_loss or pressed_loss) - pressed_loss
        return min(EVENT_SHARE * abs(pressed_loss), EVENT_WAY * max(way, 0.0))

    def _first_provisional(self, first: float) -> float:
        if first <= self.named:
            return self.named
        mean = math.sqrt(self.named * first) if self.named > 0 else first
        return min(mean, self.named + FIRST_WAY * (first - self.named))

    # --- after a step ---------------------------------------------------------------------

    def advance(self, step: int, fma: float, selection_loss: Measure) -> Answer:
        """Go on to the next stage if this one is over.

        `fma` is the present work per token. `selection_loss(thorough)` measures the present
        model on data that it is not trained on.
        """
        before, self.advanced_at = self.advanced_at, step
        if fma != self.present_fma:
            self.present_fma, self.cut_at = fma, step
        if self.stage == "start" and step < self.ends_at:
            return self._before_trials(step, fma)
        if self.stage == "anneal":
            return self._steer_anneal(before, step, fma, selection_loss)
        if step < self.ends_at:
            return Answer()
        if self.stage != "trial":
            self.loss_before = self._loss_before()
            self._enter_planned("trial", step, TRIAL)
            return Answer()
        return self._judge(step, fma, selection_loss(True))

    def _loss_before(self) -> float:
        """The present loss, from which a trial falls; not that of a spike."""
        loss = self.loss if self.recent else self.named
        pressed = self.pressed_loss(self.advanced_at)
        if self.named > 0 and pressed is not None:
            loss = min(loss, SPIKE * pressed)
        return max(loss, 1e-12)

    def _before_trials(self, step: int, fma: float) -> Answer:
        """Keep the state in which the first provisional loss is reached, to return to."""
        first = self.pressed_loss(step)
        if self.good_at is None and first is not None and self.loss <= 1.1 * first:
            self.good_at, self.good_fma = step, fma
            return Answer(keep=True)
        return Answer()

    def _judge(self, step: int, fma: float, loss: float) -> Answer:
        """The end of a trial: go on from here, or return to the last state that was good."""
        used = self.provisional or self._first_provisional(self.first_loss or self.named)
        loss = loss if math.isfinite(loss) else math.inf
        logarithmic = self.named > 0 and math.isfinite(loss)
        self.fall = math.log(self.loss_before / max(loss, 1e-12)) if logarithmic else 0.0
        row = {"step": step, "fma": fma, "loss_before": self.loss_before, "pressed_loss": used}
        self.trials.append({**row, "selection_loss": loss if math.isfinite(loss) else None})
        above = loss - self.aim
        missing = math.log(max(loss, 1e-12) / self.aim) if self.aim > 0 else above
        reach = self._further() + self._later(step)
        enough = loss <= self.named or missing <= reach
        patience = PATIENCE * max(self.fall, 0.0) if self._another_trial(step) else 0.0
        smaller = self.good_at is not None and fma < 0.999 * self.good_fma
        back = smaller and not enough and missing > reach + patience
        self._holds(step, fma, loss)
        if back:
            self.too_loose = min(used, self.too_loose or math.inf)
            self.fall = self.good_fall or self.fall
        elif enough or not smaller:
            self.good_at, self.good_fma = step, fma
            self.good_fall, self.good_loss = self.fall, used
        self.provisional = self._next_provisional(back, missing)
        self._after_trial(step)
        self.recent = [] if back else self.recent
        if back:
            reason = f"a trial anneal of {amount(fma, self.unit)} led to a loss of {loss:.4g}"
            reason += f", too high for {self.named:g}, {_NORMAL}"
            return Answer(return_to=self.good_at, reason=reason)
        return Answer(keep=self.good_at == step)

    def _next_provisional(self, back: bool, missing: float) -> float:
        """What to press towards after a trial; `back` where it sent the run back."""
        wanted = self._wanted(missing)
        if self.too_loose is None:
            return wanted
        # Losses that never come near zero have a floor: no more than half of the way down.
        halfway = (self.too_loose + self.named) / 2
        tighter = TIGHTER * self.too_loose if self.named > 0 else halfway
        if back and self.good_loss is not None and 0 < self.good_loss < self.too_loose:
            # Between one that was good and one that was not.
            wanted = math.sqrt(self.good_loss * self.too_loose)
        elif back and self.named > 0:
            wanted = max(wanted, TIGHTEST * self.too_loose)
        return min(wanted, max(tighter, halfway))

    def _holds(self, step: int, fma: float, loss: float) -> bool:
        """Whether this is the best state so far that has the target loss; noted if it is.

        The best is the smallest of those that have it for sure, else the one of the least loss.
        """
        if loss <= self.sure:
            better = fma < self.held_fma or self.held_loss > self.sure
        else:
            better = loss <= self.named and loss < self.held_loss
        if not better:
            return False
        self.held_at, self.held_fma, self.held_loss = step, fma, loss
        return True

    def stays(self, loss: float, fma: float) -> bool:
        """Whether the final model, with this loss on selection data, is what the run ends on.

        Not if a state that was kept has the target loss more surely at about the same size.
        """
        surer = self.held_loss <= self.sure and self.held_fma <= NEAR * fma
        return loss <= (self.sure if surer else self.named)

    def in_doubt(self) -> str | None:
        """A warning after a trial that did not reach the target loss."""
        if not self.trials or self.trials[-1]["step"] != self.advanced_at:
            return None
        last = self.trials[-1]
        loss = last["selection_loss"]
        if loss is None or loss <= self.named:
            return None
        return (
            f"after a trial anneal at step {last['step']:,} of {self.steps:,} the model of "
            f"{amount(last['fma'], self.unit)} has a loss of {loss:.4g}, above the named "
            f"{self.named:g}; the target is not missed yet: {_LAST_ANNEAL}"
        )

    def _further(self) -> float:
        """How much further than the trial the last anneal lowers the loss, logarithmically."""
        return min(FURTHER * max(self.fall, 0.0), MOST_FURTHER)

    def _later(self, step: int) -> float:
        """The same for what the model learns before the last anneal begins."""
        anneals = (self.steps - step) / max(self.anneal, 1)
        return LATER * max(self.fall, 0.0) * max(anneals - 1, 0.0)

    def _wanted(self, missing: float) -> float:
        """The provisional loss from which an anneal should lead to the target.

        The last trial ended above the aim by `missing`, logarithmically.
        """
        first = self.named if self.first_loss is None else self.first_loss
        way = self.named + WAY * max(first - self.named, 0.0)
        if self.by_harm and 0 < first <= self.named:  # a pretrained model, which has the loss
            way = self.named * math.exp(self._further())
        if self.named <= 0:  # a loss that can be negative has no logarithm
            return self.named + FIRST_WAY * (way - self.named)
        wanted = self.loss_before * math.exp(STEP * (self._further() - missing))
        return min(wanted, way, self.growth * max(self.loss_before, self.named))

    def _steer_anneal(self, before: int, step: int, fma: float, selection_loss: Measure) -> Answer:
        """Correct the pressed loss by what selection data say; `before` is the last call.

        A state that holds is kept, to end on if the pressure goes too far.
        """
        landing = step >= self.steps - LANDING * self.steps
        # By intervals passed, not by multiples: with a time budget, steps are ticks of a clock.
        past, now = ((each - self.began_at) // (4 * self.grain) for each in (before, step))
        if step >= self.steps or (not landing and past == now):
            return Answer()
        loss = selection_loss(landing)
        gap = loss - self.loss
        if math.isfinite(gap):
            self.gap = gap if self.gap is None else 0.5 * self.gap + 0.5 * gap
        stalled = step - self.cut_at >= max(STALLED * self.steps, LEAST_STALL)
        self.released = (landing or stalled) and not loss <= self.aim
        if not landing:
            if not (loss <= self.aim and fma < self.held_fma):
                return Answer()
            loss = selection_loss(True)
        return Answer(keep=self._holds(step, fma, loss))
