"""Polynomial long division over Z/p, written out: the grammar, and the parser that checks it.

A polynomial is a sum of terms, highest power first, including zero terms. A term is four words,
`c x ^ e`. A polynomial of degree n divided by one of degree 1:

    problem     A / B
    inverse     inv b1 = i ;
    n rounds, e from n - 1 down to 0; l is the leading coefficient left, at first l = an:
      divide      l x ^ e+1 / b1 x ^ 1 ; l * i = qe ; qe x ^ e ;
      multiply    qe * b1 = l ; qe * b0 = pe ; l x ^ e+1 + pe x ^ e ;
      subtract    l - l = 0 ; ae - pe = re ; 0 x ^ e+1 + re x ^ e ;
      accumulate  : the quotient so far ;
    answer      = quotient rem r0 x ^ 0 end

All equations have one of three forms: `inv u = i`, `v * w = p` and `y - z = r`. A drill has
the same equations at the same positions, each with independent operands, and padding for all
other words. Words are the numbers 0 to p - 1 and SYMBOLS. Uses no tensors and draws nothing.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SYMBOLS = ("x", "^", "+", "-", "*", "/", "=", "inv", ";", ":", "rem", "end", "pad")

# A template's words are symbols, exponents, and names of numbers such as q2. Numbers with these
# letters are given by the problem; the others follow from them.
_GIVEN = "abuvwyz"


@dataclass(frozen=True)
class Line:
    """One step of a template, or of a sequence."""

    step: str
    words: tuple[str, ...]


@functools.cache
def division(degree: int) -> tuple[Line, ...]:
    """The template of a division; its first line is the problem, its last the answer."""
    divisor = _sum("b", 1, 0)
    lines = [
        Line("problem", (*_sum("a", degree, 0), "/", *divisor)),
        Line("inverse", ("inv", "b1", "=", "i", ";")),
    ]
    lead = f"a{degree}"
    for e in reversed(range(degree)):
        q, p, r = (f"{letter}{e}" for letter in "qpr")
        high, low = ("x", "^", str(e + 1)), ("x", "^", str(e))
        steps = {
            "divide": (lead, *high, "/", "b1", "x", "^", "1", ";",
                       *equation(lead, "*", "i", q), q, *low, ";"),
            "multiply": (*equation(q, "*", "b1", lead), *equation(q, "*", "b0", p),
                         lead, *high, "+", p, *low, ";"),
            "subtract": (*equation(lead, "-", lead, "0"), *equation(f"a{e}", "-", p, r),
                         "0", *high, "+", r, *low, ";"),
            "accumulate": (":", *_sum("q", degree - 1, e), ";"),
        }  # fmt: skip
        lines += [Line(f"round {degree - e}: {step}", words) for step, words in steps.items()]
        lead = r
    answer = ("=", *_sum("q", degree - 1, 0), "rem", *_sum("r", 0, 0), "end")
    return (*lines, Line("answer", answer))


@functools.cache
def drill(degree: int) -> tuple[Line, ...]:
    """The template of a drill: a division's equations, each with independent operands."""
    products, differences = itertools.count(), itertools.count()

    def drilled(statement: tuple[str, ...]) -> tuple[str, ...]:
        match statement:
            case ("inv", _, "=", _, ";"):
                return "inv", "u0", "=", "i0", ";"
            case (_, "*", _, "=", _, ";"):
                k = next(products)
                return equation(f"v{k}", "*", f"w{k}", f"p{k}")
            case (_, "-", _, "=", _, ";"):
                k = next(differences)
                return equation(f"y{k}", "-", f"z{k}", f"r{k}")
        return ("pad",) * len(statement)

    return tuple(
        Line(line.step, tuple(word for part in _statements(line.words) for word in drilled(part)))
        for line in division(degree)
    )


def _statements(words: Sequence[str]) -> list[tuple[str, ...]]:
    """The words split after every semicolon."""
    ends = [k + 1 for k, word in enumerate(words) if word == ";" or k + 1 == len(words)]
    return [tuple(words[start:end]) for start, end in itertools.pairwise([0, *ends])]


def equation(left: str, operation: str, right: str, result: str) -> tuple[str, ...]:
    return left, operation, right, "=", result, ";"


def _sum(letter: str, highest: int, lowest: int) -> tuple[str, ...]:
    """Terms joined by +, highest power first."""
    exponents = range(highest, lowest - 1, -1)
    return tuple(word for e in exponents for word in ("+", f"{letter}{e}", "x", "^", str(e)))[1:]


def words_of(lines: Iterable[Line]) -> list[str]:
    return [word for line in lines for word in line.words]


@functools.cache
def is_name(word: str) -> bool:
    """Whether a template's word is the name of a number that differs between problems."""
    return re.fullmatch(r"[a-z]\d*", word) is not None and word != "x"


def is_given(word: str) -> bool:
    return is_name(word) and word[0] in _GIVEN


@dataclass(frozen=True)
class Fault:
    """A word that does not follow from the problem."""

    position: int
    step: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"word {self.position} ({self.step}): {self.found!r}, expected {self.expected}"


@dataclass(frozen=True)
class Grammar:
    """The words over one field, and the check of sequences of them."""

    modulus: int
    degree: int

    @property
    def vocabulary(self) -> list[str]:
        """Token -> word."""
        return [*map(str, range(self.modulus)), *SYMBOLS]

    @property
    def division(self) -> tuple[Line, ...]:
        return division(self.degree)

    @property
    def length(self) -> int:
        return len(words_of(self.division))

    @property
    def problem(self) -> int:
        """Number of words of a problem, which a solver is given."""
        return len(self.division[0].words)

    @property
    def drill(self) -> tuple[Line, ...]:
        return drill(self.degree)

    def template(self, words: Sequence[str]) -> tuple[Line, ...]:
        """The template of a drill if the first word is padding, else of a division."""
        return self.drill if words and words[0] == "pad" else self.division

    def read(self, tokens: Sequence[int]) -> list[Line]:
        """A sequence split into its steps."""
        vocabulary = self.vocabulary
        words, lines = [vocabulary[token] for token in tokens], []
        for line in self.template(words):
            here, words = words[: len(line.words)], words[len(line.words) :]
            lines.append(Line(line.step, tuple(here)))
        return lines

    def faults(self, tokens: Sequence[int]) -> list[Fault]:
        """Every wrong word; empty if the sequence is correct.

        The correct words follow from the problem, or from the operands of a drill. If the
        problem itself is invalid, only its own faults are returned.
        """
        vocabulary = self.vocabulary
        for position, token in enumerate(tokens):
            if not 0 <= token < len(vocabulary):
                return [Fault(position, "vocabulary", str(token), f"0 to {len(vocabulary) - 1}")]
        if len(tokens) != self.length:
            return [Fault(len(tokens), "length", f"{len(tokens)} words", str(self.length))]
        words = [vocabulary[token] for token in tokens]
        template = self.template(words)
        steps = [line.step for line in template for _ in line.words]
        names = words_of(template)
        rows = list(zip(range(len(words)), steps, words, names, strict=True))
        given: dict[str, str] = {}
        invalid = []
        for position, step, word, name in rows:
            # The first occurrence of a number defines its value.
            if is_given(name) and name not in given:
                given[name] = word
                if expected := self._expected_instead(name, word):
                    invalid.append(Fault(position, step, word, expected))
        if invalid:
            return invalid
        values = self.solve({name: int(word) for name, word in given.items()})
        correct = [str(values.get(name, name)) for name in names]
        return [
            Fault(position, step, word, expected)
            for (position, step, word, _), expected in zip(rows, correct, strict=True)
            if word != expected
        ]

    def _expected_instead(self, name: str, word: str) -> str:
        """A description of the valid words if this one is invalid for a given number, else ""."""
        if not word.isdecimal():
            return "a number"
        is_unit = name in ("b1", f"a{self.degree}") or name[0] == "u"
        return "a number other than 0" if is_unit and word == "0" else ""

    def solve(self, given: Mapping[str, int]) -> dict[str, int]:
        """The given numbers and all numbers that follow from them, by name."""
        p, values = self.modulus, dict(given)
        if "u0" in given:
            values["i0"] = pow(given["u0"], -1, p)
            for k in range(3 * self.degree):
                values[f"p{k}"] = given[f"v{k}"] * given[f"w{k}"] % p
            for k in range(2 * self.degree):
                values[f"r{k}"] = (given[f"y{k}"] - given[f"z{k}"]) % p
            return values
        values["i"] = pow(given["b1"], -1, p)
        lead = given[f"a{self.degree}"]
        for e in reversed(range(self.degree)):
            values[f"q{e}"] = lead * values["i"] % p
            values[f"p{e}"] = values[f"q{e}"] * given["b0"] % p
            lead = values[f"r{e}"] = (given[f"a{e}"] - values[f"p{e}"]) % p
        return values
