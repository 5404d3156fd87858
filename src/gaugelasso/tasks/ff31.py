"""FF31: polynomial long division over Z/31 (or another prime), every step written out.

A sequence is a problem and its solution in the words of longhand.py; the model predicts
the next word, from the end of the problem on. A share of training examples are drills of
single operations: there the results alone count, since operands cannot be foreseen.

A problem is held out if its remainder is the sum of the coefficients of quotient and
divisor, one problem in `modulus`; training draws from the others.
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
# Each is solved word by word, a forward pass a word: enough to see whether it can.
_SOLVED = 64


@dataclass(frozen=True)
class FF31:
    modulus: int = 31
    degree: int = 3
    drills: float = 0.1

    metric_name: ClassVar[str] = "exact match"
    metric_lower_is_better: ClassVar[bool] = False
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
        """Drawn from the end, divisor, quotient and remainder: no round waits for another.

        A stream's problems are uniform all the same: each has one quotient and one remainder.
        """
        p, n, plan = self.modulus, self.degree, _plan(self, device)
        generator = torch.Generator(device).manual_seed(draw.seed)
        units = torch.randint(1, p, (size, 4), generator=generator, device=device)
        others = torch.randint(p, (size, n), generator=generator, device=device)
        chance = torch.rand(size, 1 + 10 * n, generator=generator, device=device)
        b1, top, shift, u = units.split(1, dim=1)
        b0, lower = others.split([1, n - 1], dim=1)
        # Operands of drills lean to small numbers. A difference of uniform ones says nothing of
        # either alone, so attention that sees only one, or neither, would have nothing to go by.
        operands = (p * chance[:, 1:] ** 3).long()
        v, w, y, z = operands.split([3 * n, 3 * n, 2 * n, 2 * n], dim=1)
        inverses = plan.inverses[units]
        q = torch.cat([top, lower], dim=1)
        held_out = q.sum(dim=1, keepdim=True) + b1 + b0
        remainder = (held_out if draw.held_out else held_out + shift) % p
        lead, product = q * b1 % p, q * b0 % p
        # What a round leaves is what the next begins with.
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
        """Share of sequences whose every supervised word is foretold, each from right ones."""
        right = (outputs.argmax(dim=-1) == targets) | (targets == kernels.NO_TARGET)
        return right.all(dim=1).float().mean()

    def final_figures(
        self, predict: Predict, size: int, draws: Sequence[Draw], device: str
    ) -> dict[str, float]:
        """Words foretold from right ones, and problems solved with nothing but its own words."""
        shares = []
        for draw in draws:
            tokens, targets = self.batch(size, draw, device)
            counts = targets != kernels.NO_TARGET
            right = (predict(tokens).argmax(dim=-1) == targets) & counts
            shares.append(right.sum() / counts.sum())
        tokens, _ = self.batch(min(size, _SOLVED), draws[0], device)
        same = self.solve(predict, tokens) == tokens
        answer = len(self.grammar.division[-1].words)
        return {
            "token accuracy": float(torch.stack(shares).mean()),
            "free-running exact match": float(same.all(dim=1).float().mean()),
            "free-running answer accuracy": float(same[:, -answer:].all(dim=1).float().mean()),
        }

    def solve(self, predict: Predict, tokens: Tensor) -> Tensor:
        """The problems of some sequences [B, S], solved word by word: likeliest word first."""
        grammar = self.grammar
        written = tokens.clone()
        written[:, grammar.problem :] = grammar.vocabulary.index("pad")
        for position in range(grammar.problem, self.length):
            written[:, position] = predict(written)[:, position - 1].argmax(dim=-1)
        return written


@dataclass(frozen=True)
class _Plan:
    """Where each word and each target lies in a batch's pool of numbers and constants.

    `tokens` and `targets` are [2, S]: row 0 a division, row 1 a drill.
    """

    tokens: Tensor
    targets: Tensor
    constants: Tensor
    inverses: Tensor


@functools.cache
def _plan(task: FF31, device: str) -> _Plan:
    """Made once: copies from the host would stop the device at every batch."""
    p, n, grammar = task.modulus, task.degree, task.grammar
    # In the order in which `batch` lays them side by side.
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
    divided = {name: k for k, name in enumerate(columns)} | words
    practised = {name: len(columns) + k for k, name in enumerate(drilled)} | words

    def targets(places: list[int], supervised: list[bool]) -> list[int]:
        """Each position's next word, where that one counts."""
        following = zip(places[1:], supervised[1:], strict=True)
        return [*(place if counts else ignored for place, counts in following), ignored]

    division, drill = words_of(grammar.division), words_of(grammar.drill)
    tokens = [[divided[word] for word in division], [practised[word] for word in drill]]
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
