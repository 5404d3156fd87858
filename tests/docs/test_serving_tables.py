"""The tables of measurements on the serving page are those of the files of rows, and complete."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.serving import ratios

from tests.docs.pages import ROOT, SERVING, rows, under

Row = dict[str, Any]
GPU = ROOT / "benchmarks" / "serving_nvidia-h200_2026-11-18.json"
CPU = ROOT / "benchmarks" / "serving_cpu-2-cores-aarch64_2026-11-18.json"
X86 = ROOT / "benchmarks" / "serving_cpu-2-cores-x86_64_2026-11-19.json"
WORKS = {
    "language model": "charlm",
    "SmolLM2-135M": "smollm2",
    "retrieval": "retrieval",
    "division": "division",
    "demo": "demo",
}
MODELS = ("ancestor", "uniform", "compressed")
GPU_COLUMNS = [(model, "gaugelasso") for model in MODELS]
GPU_COLUMNS += [("ancestor", "transformers"), ("uniform", "transformers")]
ENGINES = {name: name for name in ("onnxruntime", "llama.cpp")}
ENGINES |= {"ours": "gaugelasso", "`transformers`": "transformers", "export `hf`": "hf"}
# "language model: 96 × 512 tokens", "demo: step of 1 at position 32"
PREFILL = re.compile(r"(\d+) × (\d+) tokens(, last logits)?")
STEP = re.compile(r"step of (\d+) at position (\d+)")
NONE = "–"  # not measured
Key = tuple[Any, ...]


def key_of(row: Row) -> Key:
    names = ("work", "phase", "batch", "length", "logits", "model", "engine", "threads")
    return tuple(row.get(name) for name in names)


def case_of(label: str) -> Key:
    """Work, phase, batch, length and logits of a first cell."""
    name, _, what = label.partition(": ")
    if found := PREFILL.fullmatch(what):
        logits = "last" if found[3] else None
        return (WORKS[name], "prefill", int(found[1]), int(found[2]), logits)
    found = STEP.fullmatch(what)
    assert found, label
    return (WORKS[name], "decode", int(found[1]), int(found[2]), None)


def check_cell(cell: str, value: float) -> None:
    """The cell is the value, rounded to the digits that it shows."""
    number = re.fullmatch(r"([\d,]+)(\.\d+)?(M?)( \*)?", cell)
    assert number, cell
    digits = len(number[2] or ".") - 1
    shown = value / 1e6 if number[3] else value
    # At least two significant digits, so that a rounded cell still says something.
    assert len(re.sub(r"\D", "", cell).lstrip("0")) >= 2, cell
    assert f"{shown:,.{digits}f}" == f"{number[1]}{number[2] or ''}", (cell, value)


def measured(path: Path) -> dict[Key, Row]:
    return {key_of(row): row for row in json.loads(path.read_text())["rows"]}


def gpu_cells() -> Iterator[tuple[str, str, tuple[str, str]]]:
    for label, *cells in rows(under("## On a GPU", SERVING)):
        for cell, column in zip(cells, GPU_COLUMNS, strict=True):
            yield label, cell, column


def test_the_table_of_the_gpu_is_that_of_its_rows() -> None:
    kept = measured(GPU)
    shown = set()
    for label, cell, (model, engine) in gpu_cells():
        name, _, what = label.partition(": ")
        of_model = [
            row
            for row in kept.values()
            if (row["work"], row["model"], row["engine"]) == (WORKS[name], model, engine)
        ]
        if what in ("FMA per token", "cache, bytes per token"):
            field = "fma" if what == "FMA per token" else "cache_bytes_per_token"
            values = {row[field] for row in of_model}
            if cell != NONE or (field == "cache_bytes_per_token" and values):
                check_cell(cell, *values)
            continue
        key = (*case_of(label), model, engine, None)
        assert (cell != NONE) == (key in kept), key
        if cell != NONE:
            check_cell(cell, kept[key]["ms"])
            shown.add(key)
    assert shown == kept.keys()


def test_the_tables_of_the_cpu_are_those_of_its_rows() -> None:
    text = under("## On a CPU", SERVING)
    tables = re.findall(r"^\| (.*(?:one|two) threads?) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    assert len(tables) == 5
    files = {path: measured(path) for path in (CPU, X86)}
    shown: dict[Path, set[Key]] = {path: set() for path in files}
    for head, body in tables:
        path = X86 if head.startswith("x86-64") else CPU
        kept = files[path]
        threads = 1 if "one thread" in head else 2
        for label, engine, *cells, ratio in rows(f"|\n|-|\n{body}"):
            ms = {}
            for cell, model in zip(cells, MODELS, strict=True):
                key = (*case_of(label), model, ENGINES[engine], threads)
                assert (cell != NONE) == (key in kept), key
                if cell != NONE:
                    check_cell(cell, kept[key]["ms"])
                    ms[model] = kept[key]["ms"]
                    shown[path].add(key)
            both = "ancestor" in ms and "compressed" in ms
            assert ratio == (f"{ms['ancestor'] / ms['compressed']:.1f}" if both else NONE)
    assert shown == {path: set(kept) for path, kept in files.items()}


@pytest.mark.parametrize(
    ("path", "heading"), [(GPU, "## On a GPU"), (CPU, "## On a CPU"), (X86, "## On a CPU")]
)
def test_the_page_names_every_commit_that_was_measured(path: Path, heading: str) -> None:
    commits = {row["commit"][:7] for row in json.loads(path.read_text())["rows"]}
    text = under(heading, SERVING)
    assert commits <= set(re.findall(r"`([0-9a-f]{7})`", text))
    assert path.name in text


@pytest.mark.parametrize("path", [GPU, CPU, X86], ids=lambda path: path.stem)
def test_the_ratios_of_a_file_follow_from_its_rows(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content["ratios"] == ratios(content["rows"])
