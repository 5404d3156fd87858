"""Polynomial long division over Z/p, written out: the grammar, and the parser that checks it.

A polynomial is a sum of terms, highest power first, zeros written too; a term is four
words, `c x ^ e`. Of degree n divided by a line (n + 1 terms by two):

    problem     A / B
    inverse     inv b1 = i ;
    n rounds, e falling from n - 1 to 0; l leads what is left, at first l = an:
      divide      l x ^ e+1 / b1 x ^ 1 ; l * i = qe ; qe x ^ e ;
      multiply    qe * b1 = l ; qe * b0 = pe ; l x ^ e+1 + pe x ^ e ;
      subtract    l - l = 0 ; ae - pe = re ; 0 x ^ e+1 + re x ^ e ;
      accumulate  : the quotient so far ;
    answer      = quotient rem r0 x ^ 0 end

So numbers meet in equations of three forms alone, `inv u = i`, `v * w = p` and `y - z = r`.
A drill has the same equations in the same places, each with operands of its own, and
padding for everything else. Words are the numbers 0 to p - 1 and SYMBOLS. Knows no tensors
and draws nothing.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SYMBOLS = ("x", "^", "+", "-", "*", "/", "=", "inv", ";", ":", "rem", "end", "pad")

# A template's words are symbols, exponents, and names of numbers such as q2. Those of
# these letters a problem gives; the others follow from them.
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
    """The template of a drill: a division's equations, each with operands of its own."""
    products, differences = itertools.count(), itertools.count()

    def practised(statement: tuple[str, ...]) -> tuple[str, ...]:
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
        Line(line.step, tuple(word for part in _statements(line.words) for word in practised(part)))
        for line in division(degree)
    )


def _statements(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Words cut after every ; there is."""
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


def is_name(word: str) -> bool:
    """Whether a template's word stands for a number that differs from problem to problem."""
    return re.fullmatch(r"[a-z]\d*", word) is not None and word != "x"


def is_given(word: str) -> bool:
    return is_name(word) and word[0] in _GIVEN


@dataclass(frozen=True)
class Fault:
    """A word that is not what the problem before it makes it."""

    position: int
    step: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"word {self.position} ({self.step}): {self.found!r}, where {self.expected} is right"


@dataclass(frozen=True)
class Grammar:
    """The words of one field, and what sequences of them are right."""

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
        """Words of a problem: what a solver is given."""
        return len(self.division[0].words)

    @property
    def drill(self) -> tuple[Line, ...]:
        return drill(self.degree)

    def template(self, words: Sequence[str]) -> tuple[Line, ...]:
        """That of a drill or of a division: the first word tells."""
        return self.drill if words and words[0] == "pad" else self.division

    def read(self, tokens: Sequence[int]) -> list[Line]:
        """A sequence cut into its steps."""
        vocabulary = self.vocabulary
        words, lines = [vocabulary[token] for token in tokens], []
        for line in self.template(words):
            mine, words = words[: len(line.words)], words[len(line.words) :]
            lines.append(Line(line.step, tuple(mine)))
        return lines

    def faults(self, tokens: Sequence[int]) -> list[Fault]:
        """Every word that is wrong; none if the sequence is right.

        What is right follows from the problem (of a drill: the operands). Where that makes
        no sense itself, its own faults are all that is said.
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
        places = list(zip(range(len(words)), steps, words, names, strict=True))
        given: dict[str, str] = {}
        senseless = []
        for position, step, word, name in places:
            # Named again later, a number is to be what it was at first.
            if is_given(name) and name not in given:
                given[name] = word
                if expected := self._refused(name, word):
                    senseless.append(Fault(position, step, word, expected))
        if senseless:
            return senseless
        values = self.solve({name: int(word) for name, word in given.items()})
        right = [str(values.get(name, name)) for name in names]
        return [
            Fault(position, step, word, expected)
            for (position, step, word, _), expected in zip(places, right, strict=True)
            if word != expected
        ]

    def _refused(self, name: str, word: str) -> str:
        """What a given number should have been, if it cannot be this word."""
        if not word.isdecimal():
            return "a number"
        is_unit = name in ("b1", f"a{self.degree}") or name[0] == "u"
        return "a number other than 0" if is_unit and word == "0" else ""

    def solve(self, given: Mapping[str, int]) -> dict[str, int]:
        """The given numbers and all that follow from them, by name."""
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
