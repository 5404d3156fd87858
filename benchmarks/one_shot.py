"""Which channels a pretrained model can lose, before any training.

    gaugelasso import SmolLM2-135M-Instruct.Q4_1.gguf --out bases/smol
    python -m benchmarks.one_shot bases/smol --data train.txt --valid valid.txt \
        --rankings fisher utility --ratios 1.1 1.2 --out results/smollm2/one_shot.json

Filters of MLPs and value channels go, in one cut, those of the least score per FMA first. Rankings:

- magnitude: the sum of the squares of a channel's weights
- uniform: the same, filters alone, equally many in each MLP
- energy: the mean square of what the channel writes
- first: the sum of weight times gradient over all tokens, without its sign
- fisher: the mean square of that sum over windows, which is what `compress.removal = "harm"` uses
- tokens: the mean square of its part of each token
- utility: the corrected utility of the penalty, in the balanced gauge (post-hoc pruning)
- unexplained: tokens, times the share of the channel that those beside it do not explain
- operators: whole operators first, those whose absence costs the least per FMA; then tokens

Each is measured as it is, and *compensated*: the map that writes is fitted again by ridge least
squares, so that the channels that stay write what all did. --weights says how tokens count in it:
alike (plain), or by one over their mean square in the stream (level). A row is replaced by one of
the same settings. Bits per byte are means over windows, and `se` is the standard error of the mean
difference to the original.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmarks.one_shot_scores import (
    RANKINGS,
    Moments,
    Scores,
    calibrate,
    ridged,
    scores_of,
    writers,
)
from benchmarks.smollm2 import all_kept, cut, decided, fma_of, state_of
from torch import Tensor

from gaugelasso.compress.model_state import ModelState
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json
from gaugelasso.tasks import TEST, Draw, Tokens


def bits_of(model: Transformer, task: Tokens, windows: int, threads: int) -> Tensor:
    """Bits per byte of each of some windows that are spread over the validation text."""
    model.eval()
    apart = max(1, task.whole_windows(TEST) // windows)

    def of(index: int) -> Tensor:
        with torch.no_grad():
            inputs, targets = task.batch(1, Draw(0, index * apart, TEST), "cpu")
            return task.metric(model(inputs), targets).double()

    # On a busy machine, threads within an operation wait for each other.
    with ThreadPoolExecutor(threads) as pool:
        return torch.stack(list(pool.map(of, range(windows))))


def losses_without(model: Transformer, task: Tokens, seed: int, threads: int) -> dict[str, float]:
    """What the loss of a window rises by without each operator."""
    inputs, targets = task.batch(1, Draw(seed), "cpu")
    names, before = list(model.operators), {}

    def loss_from(place: int, stream: Tensor) -> float:
        with torch.no_grad():
            for name in names[place:]:
                stream = model.operators[name](stream, 1)
            outputs = model.classifier(stream).view(*inputs.shape, -1)
            return float(task.loss(outputs, targets))

    with torch.no_grad():
        stream = model.embedding(inputs, len(model.sites))
        for name in names:
            before[name] = stream.clone()
            stream = model.operators[name](stream, 1)
    whole = loss_from(len(names), stream)
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(loss_from, range(1, len(names) + 1), before.values())
        return {name: loss - whole for name, loss in zip(names, found, strict=True)}


# --- choosing ----------------------------------------------------------------------------------


def keeps_to(state: ModelState, scores: Scores, target: float) -> dict[str, Tensor]:
    """Keep-sets without the fewest channels, least score per FMA first, that reach the target."""
    assert isinstance(state.model, Transformer)
    names = list(scores)
    share = torch.cat([
        scores[name].double() / torch.from_numpy(state.prices[name]) for name in names
    ])  # fmt: skip
    places = dict(zip(names, share.argsort().argsort().split([len(scores[name]) for name in names]),
                      strict=True))  # fmt: skip

    def keeps(number: int) -> dict[str, Tensor]:
        return all_kept(state.model) | {name: place >= number for name, place in places.items()}

    def work(number: int) -> float:
        decision = decided(state, keeps(number))
        return -math.inf if decision is None else state.work_after(decision)

    low, high = 0, int(share.isfinite().sum())
    if work(high) > target:
        raise SystemExit(f"{target:,.0f} FMA per token cannot be reached by these channels")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if work(middle) <= target else (middle, high)
    return keeps(high)


def operators_first(
    state: ModelState, scores: Scores, rises: dict[str, float], target: float
) -> Scores:
    """The scores, with those of whole operators below all others, as many as the target allows."""
    assert isinstance(state.model, Transformer)
    parts, keeps = writers(state.model), all_kept(state.model)
    saved, gone = {}, dict(scores)
    for name, part in parts.items():
        saved[name] = float(state.prices[part.axis].sum())
    for name in sorted(rises, key=lambda name: rises[name] / saved[name]):
        axis = parts[name].axis
        tried = keeps | {axis: torch.zeros_like(keeps[axis])}
        decision = decided(state, tried)
        if decision is None or state.work_after(decision) < target:
            break
        keeps, gone[axis] = tried, torch.full_like(scores[axis], -1.0)
    return gone


# --- cutting ----------------------------------------------------------------------------------


@torch.no_grad()
def compensate_(
    model: Transformer, keeps: dict[str, Tensor], moments: dict[str, Moments], weights: str
) -> None:
    """Fit every map that writes, so that the features that stay write what all did.

    W_S += (H_SS + ridge)^-1 H_SP W_P, with the second moments H of the features, of which S stay.
    """
    for name, part in writers(model).items():
        stay = keeps[part.axis][part.channel]
        if stay.all() or not stay.any():
            continue
        second = moments[name].second[weights]
        factor = torch.linalg.cholesky(ridged(second[stay][:, stay]))
        wanted = second[stay][:, ~stay] @ part.matrix[~stay]
        part.matrix[stay] += torch.cholesky_solve(wanted, factor)


def smaller(
    model: Transformer, state: ModelState, keeps: dict[str, Tensor], change_: Callable[..., None]
) -> Transformer:
    """A copy, changed and then cut."""
    found = copy.deepcopy(model)
    change_(found, keeps)
    decision = decided(state, keeps)
    assert decision is not None
    cut(found, state, decision)
    return found


class Comparison:
    """All settings on one model, the rows of which are written as they come."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        model = load_model(given.base)
        assert isinstance(model, Transformer)
        model.set_context_(given.length)
        self.task = Tokens(path=given.data, valid=given.valid, tokenizer=str(given.base),
                           vocabulary=model.spec().inputs, length=given.length)  # fmt: skip
        self.model, self.fma = model.eval(), fma_of(model)
        self.state = state_of(model)
        self.moments = self._calibrated(model, given.kept)
        self._scores: dict[str, Scores] = {}
        self._rises: dict[str, float] = {}
        self._original: list[float] = []

    def _calibrated(self, model: Transformer, kept: Path | None) -> dict[str, Moments]:
        if kept and kept.exists():
            return {name: Moments(**values) for name, values in torch.load(kept).items()}
        found = calibrate(model, self.task, self.given.calibration, self.given.seed)
        if kept:
            torch.save({name: vars(moments) for name, moments in found.items()}, kept)
        return found

    def run(self) -> None:
        given = self.given
        if (found := self._row("original", 1.0, False, 1)) is None:
            found = self._measured("original", 1.0, False, 1, time.perf_counter(), self.model)
        self._original = found["each"]
        for ratio in given.ratios:
            for ranking in given.rankings:
                for compensated in given.compensated:
                    if self._row(ranking, ratio, compensated, given.rounds) is None:
                        self._setting(ranking, ratio, compensated)

    def _setting(self, ranking: str, ratio: float, compensated: bool) -> None:
        began, rounds = time.perf_counter(), self.given.rounds
        model, state, moments = self.model, self.state, self.moments
        for number in range(1, rounds + 1):
            target = self.fma / ratio ** (number / rounds)
            if number > 1:
                state = state_of(model)
                moments = calibrate(model, self.task, self.given.calibration, self.given.seed)
            if number > 1 or ranking not in self._scores:
                self._scores[ranking] = scores_of(ranking, state, moments)
            scores = self._scores.pop(ranking) if rounds > 1 else self._scores[ranking]
            if ranking == "operators":
                self._rises = self._rises or losses_without(
                    model, self.task, self.given.seed, self.given.threads
                )
                scores = operators_first(state, scores, self._rises, target)

            def change_(model: Transformer, keeps: dict[str, Tensor],
                        moments: dict[str, Moments] = moments) -> None:  # fmt: skip
                if compensated:
                    compensate_(model, keeps, moments, self.given.weights)

            model = smaller(model, state, keeps_to(state, scores, target), change_)
        self._measured(ranking, ratio, compensated, rounds, began, model)

    # --- rows -----------------------------------------------------------------------------------

    def _rows(self) -> list[dict[str, Any]]:
        path: Path = self.given.out
        return json.loads(path.read_text())["rows"] if path.exists() else []

    def _settings(
        self, ranking: str, ratio: float, compensated: bool, rounds: int
    ) -> dict[str, Any]:
        given = self.given
        return {
            "method": ranking,
            "ratio": ratio,
            "compensated": given.weights if compensated else "no",
            "rounds": rounds,
            "seed": given.seed,
            "calibration": given.calibration,
            "windows": given.windows,
        }

    def _row(self, *setting: Any) -> dict[str, Any] | None:
        same = self._settings(*setting)
        return next((row for row in self._rows() if row | same == row), None)

    def _measured(
        self, ranking: str, ratio: float, compensated: bool, rounds: int, began: float,
        model: Transformer,
    ) -> dict[str, Any]:  # fmt: skip
        given = self.given
        bits = bits_of(model, self.task, given.windows, given.threads)
        row = self._settings(ranking, ratio, compensated, rounds)
        rise = bits - torch.tensor(self._original or bits.tolist(), dtype=torch.float64)
        row |= {
            "fma": fma_of(model),
            "bits_per_byte": float(bits.mean()),
            "rise": float(rise.mean()),
            "se": float(rise.std() / math.sqrt(len(rise))),
            "each": [round(value, 5) for value in bits.tolist()],
            "seconds": time.perf_counter() - began,
        }
        make_folder(self.given.out.parent)
        write_json(self.given.out, {**environment("cpu"), "rows": [*self._rows(), row]})
        print(json.dumps(row), flush=True)
        return row


def main(words: list[str] | None = None) -> None:
    summary, example, _ = (__doc__ or "").split("\n\n", 2)
    parser = argparse.ArgumentParser(
        description=summary, epilog=example, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("base", type=Path, help="folder that gaugelasso import wrote")
    parser.add_argument("--data", required=True, help="text to measure channels on")
    parser.add_argument("--valid", required=True, help="text to measure models on")
    parser.add_argument("--rankings", nargs="+", choices=RANKINGS, default=list(RANKINGS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[1.1, 1.2, 1.5])
    parser.add_argument("--compensated", nargs="+", type=lambda word: word == "yes",
                        default=[False, True], help="no, yes or both")  # fmt: skip
    parser.add_argument("--weights", choices=("plain", "level"), default="level")
    parser.add_argument("--rounds", type=int, default=1, help="cuts, each measured again")
    parser.add_argument("--calibration", type=int, default=16, help="windows of --data")
    parser.add_argument("--windows", type=int, default=16, help="windows of --valid")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--kept", type=Path, help="file that keeps the measurements of channels")
    parser.add_argument("--threads", type=int, default=1, help="windows side by side")
    parser.add_argument("--out", type=Path, required=True, help="file of results")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    Comparison(given).run()


if __name__ == "__main__":
    main()
