"""FF31: polynomial long division over Z/31 (or another prime), every step written out.

A sequence is a problem and its solution in the words of division_grammar.py. The model predicts
the next word, from the end of the problem on. A share of training examples are drills of single
operations. In a drill only the results count, because operands cannot be predicted.

A problem is held out if its remainder is the sum of the coefficients of quotient and divisor.
That is one problem in `modulus`; training draws from the others. Selection and test draw from
the held-out problems independently: a model cannot learn a problem from being selected on it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.errors import UserError
from gaugelasso.models import InputKind
from gaugelasso.tasks.division_grammar import SYMBOLS, Grammar, is_given, is_name, words_of
from gaugelasso.tasks.protocol import Draw, Predict

_LARGEST = 997
# Problems solved in free-running mode, which takes a forward pass for every word.
_SOLVED = 64


@dataclass(frozen=True)
class FF31:
    modulus: int = 31
    degree: int = 3
    drills: float = 0.1

    metric_name: ClassVar[str] = "exact match"
    metric_lower_is_better: ClassVar[bool] = False
    metric_best: ClassVar[float] = 1.0
    input_kind: ClassVar[InputKind] = "tokens"
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        p = self.modulus
        if not 2 <= p <= _LARGEST or any(p % k == 0 for k in range(2, p)):
            raise UserError(f"task.modulus = {p}: must be a prime of at most {_LARGEST}")
        if not 1 <= self.degree < p:
            raise UserError(f"task.degree = {self.degree}: must be 1 to modulus - 1 = {p - 1}")
        if not 0 <= self.drills < 1:
            raise UserError(f"task.drills = {self.drills}: must be 0 or more, and below 1")

    @property
    def grammar(self) -> Grammar:
        return Grammar(self.modulus, self.degree)

    @property
    def inputs(self) -> int:
        return self.modulus + len(SYMBOLS)

    @property
    def outputs(self) -> int:
        return self.inputs

    @property
    def length(self) -> int:
        return self.grammar.length

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        """Draws divisor, quotient and remainder, and computes the dividend.

        So no round depends on the one before. The problems are uniform nevertheless, because
        each has exactly one quotient and one remainder.
        """
        p, n, plan = self.modulus, self.degree, _plan(self, device)
        generator = torch.Generator(device).manual_seed(draw.seed)
        units = torch.randint(1, p, (size, 4), generator=generator, device=device)
        others = torch.randint(p, (size, n), generator=generator, device=device)
        chance = torch.rand(size, 1 + 10 * n, generator=generator, device=device)
        b1, top, shift, u = units.split(1, dim=1)
        b0, lower = others.split([1, n - 1], dim=1)
        # Operands of drills are biased to small numbers. The difference of two uniform operands
        # is independent of each of them, so attention to one operand alone would get no gradient.
        operands = (p * chance[:, 1:] ** 3).long()
        v, w, y, z = operands.split([3 * n, 3 * n, 2 * n, 2 * n], dim=1)
        inverses = plan.inverses[units]
        q = torch.cat([top, lower], dim=1)
        checksum = q.sum(dim=1, keepdim=True) + b1 + b0
        remainder = (checksum if draw.held_out else checksum + shift) % p
        lead, product = q * b1 % p, q * b0 % p
        # The remainder of a round is the leading coefficient of the next.
        rest = torch.cat([lead[:, 1:], remainder], dim=1)
        dividend = [lead[:, :1], (rest + product) % p]
        numbers = [*dividend, b1, b0, inverses[:, :1], q, product, rest]
        numbers += [u, v, w, y, z, inverses[:, 3:], v * w % p, (y - z) % p]
        pool = torch.cat([*numbers, plan.constants.expand(size, -1)], dim=1)
        kind = (chance[:, 0] < (0.0 if draw.held_out else self.drills)).long()
        return pool.gather(1, plan.tokens[kind]), pool.gather(1, plan.targets[kind])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return kernels.cross_entropy(outputs, targets)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Share of sequences with every supervised word predicted, each from correct words."""
        correct = (outputs.argmax(dim=-1) == targets) | (targets == kernels.NO_TARGET)
        return correct.all(dim=1).float().mean()

    def final_figures(
        self, predict: Predict, size: int, draws: Sequence[Draw], device: str
    ) -> dict[str, float]:
        """Words predicted from correct words, and problems solved from the model's own words."""
        shares = []
        for draw in draws:
            tokens, targets = self.batch(size, draw, device)
            counts = targets != kernels.NO_TARGET
            correct = (predict(tokens).argmax(dim=-1) == targets) & counts
            shares.append(correct.sum() / counts.sum())
        tokens, _ = self.batch(min(size, _SOLVED), draws[0], device)
        same = self.solve(predict, tokens) == tokens
        answer = len(self.grammar.division[-1].words)
        return {
            "token accuracy": float(torch.stack(shares).mean()),
            "free-running exact match": float(same.all(dim=1).float().mean()),
            "free-running answer accuracy": float(same[:, -answer:].all(dim=1).float().mean()),
        }

    def solve(self, predict: Predict, tokens: Tensor) -> Tensor:
        """Solves the problems of sequences [B, S] word by word, with the likeliest word each."""
        grammar = self.grammar
        written = tokens.clone()
        written[:, grammar.problem :] = grammar.vocabulary.index("pad")
        for position in range(grammar.problem, self.length):
            written[:, position] = predict(written)[:, position - 1].argmax(dim=-1)
        return written


@dataclass(frozen=True)
class _Plan:
    """The index of each word and each target in a batch's pool of numbers and constants.

    `tokens` and `targets` are [2, S]: row 0 a division, row 1 a drill.
    """

    tokens: Tensor
    targets: Tensor
    constants: Tensor
    inverses: Tensor


@functools.cache
def _plan(task: FF31, device: str) -> _Plan:
    """Cached: a copy from the host at every batch would make the device wait."""
    p, n, grammar = task.modulus, task.degree, task.grammar
    # The order in which `batch` concatenates them.
    columns = [f"a{e}" for e in reversed(range(n + 1))] + ["b1", "b0", "i"]
    columns += [f"{letter}{e}" for letter in "qpr" for e in reversed(range(n))]
    counts = {
        "u": 1,
        "v": 3 * n,
        "w": 3 * n,
        "y": 2 * n,
        "z": 2 * n,
        "i": 1,
        "p": 3 * n,
        "r": 2 * n,
    }
    drilled = [f"{letter}{k}" for letter, count in counts.items() for k in range(count)]
    constants = [*range(task.inputs), kernels.NO_TARGET]
    words = {word: len(columns) + len(drilled) + k for k, word in enumerate(grammar.vocabulary)}
    ignored = len(columns) + len(drilled) + constants.index(kernels.NO_TARGET)
    in_division = {name: k for k, name in enumerate(columns)} | words
    in_drill = {name: len(columns) + k for k, name in enumerate(drilled)} | words

    def targets(indices: list[int], supervised: list[bool]) -> list[int]:
        """Each position's next word if it is supervised, else NO_TARGET."""
        following = zip(indices[1:], supervised[1:], strict=True)
        return [*(index if counts else ignored for index, counts in following), ignored]

    division, drill = words_of(grammar.division), words_of(grammar.drill)
    tokens = [[in_division[word] for word in division], [in_drill[word] for word in drill]]
    solution = [k >= grammar.problem for k in range(len(division))]
    results = [is_name(word) and not is_given(word) for word in drill]
    inverses = [0, *(pow(k, -1, p) for k in range(1, p))]
    return _Plan(
        tokens=torch.tensor(tokens, device=device),
        targets=torch.tensor(
            [targets(tokens[0], solution), targets(tokens[1], results)], device=device
        ),
        constants=torch.tensor(constants, device=device),
        inverses=torch.tensor(inverses, device=device),
    )
