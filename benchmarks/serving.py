"""What compression saves in serving: ancestor, uniform and compressed models, in several engines.

    python -m benchmarks.serving --works charlm --runs charlm=runs/lm-main
    OMP_NUM_THREADS=2 python -m benchmarks.serving --works charlm demo smollm2 --device cpu
    python -m benchmarks.serving --works charlm --structures charlm=results/charlm/main.json

Without `--runs`, models have the structures of `results/` and random weights, and every row says
so: times do not depend on values. The models of a case take turns. Rows are written after each
case, to benchmarks/serving_<hardware>_<date>.json; rows of an earlier command stay. `--seconds`
ends the command after the case that is under way. A case of a large model takes minutes; what is
being prepared is printed. Prefill of a large vocabulary gives the logits of last positions, and its
rows say so. What does not fit into memory is listed with the other impossible cases. Threads of a
CPU are those that OpenMP has from the start: oneDNN, which `transformers` uses, keeps to no other
number.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.engines import ENGINES
from benchmarks.serving_case import Action, Case, Impossible, check_memory, fitted

from gaugelasso.bench.inference import uniform_like
from gaugelasso.bench.measure import work_per_token
from gaugelasso.bench.rows import default_file
from gaugelasso.bench.stopwatch import in_turns, quartiles
from gaugelasso.config import load_config
from gaugelasso.errors import UserError
from gaugelasso.memory import free_bytes
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.checkpoint import load_model, load_spec
from gaugelasso.runs.environment import environment
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.writing import make_folder, write_json

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
# What identifies a row: a later measurement replaces it.
# `logits` is "last", or missing where they are of all positions.
KEYS = ("work", "model", "engine", "phase", "batch", "length", "device", "threads", "logits")
CASE = ("work", "phase", "batch", "length", "device", "threads", "dtype", "logits")


@dataclass(frozen=True)
class Work:
    """A config, the result with a compressed structure, and the uniform model to compare with.

    Without a config: `sizes` are those of the ancestor and of the uniform model.
    """

    config: str | None
    result: str
    uniform: str | None = None
    sizes: tuple[Mapping[str, int], Mapping[str, int]] | None = None

    def plain_specs(self, work: float) -> tuple[TransformerSpec, TransformerSpec]:
        """The ancestor, and the uniform model, of this work per token if there is no other."""
        if self.config is None:
            assert self.sizes is not None
            first, second = (TransformerSpec.uniform(**each) for each in self.sizes)
            return first, second
        config = load_config(ROOT / self.config)
        ancestor = config.model.spec(config.task)
        if self.uniform is None:
            return ancestor, uniform_like(config, work)
        other = load_config(ROOT / self.uniform)
        return ancestor, other.model.spec(other.task)


SMOLLM2 = {
    "layers": 30, "heads": 9, "kv_heads": 3, "d_k": 64, "d_v": 64,
    "length": 512, "inputs": 49_152, "outputs": 49_152,
}  # fmt: skip

WORKS = {
    "charlm": Work(
        "configs/charlm/main.toml", "results/charlm/main.json", "configs/charlm/uniform.toml"
    ),
    "retrieval": Work("configs/retrieval/main.toml", "results/retrieval/main.json"),
    "division": Work("configs/ff31/main.toml", "results/ff31/main.json"),
    "demo": Work("configs/retrieval/demo.toml", "results/retrieval/demo.json"),
    # The uniform model is that of the stock shape, at half of the work too.
    "smollm2": Work(
        None,
        "results/smollm2/harm-2-structure.json",
        sizes=(SMOLLM2 | {"width": 576, "d_f": 1536}, SMOLLM2 | {"width": 435, "d_f": 544}),
    ),
}


def cases(device: str, length: int) -> list[Case]:
    """The cases of a device, the most important ones first."""
    if device.startswith("cuda"):
        sizes = [("prefill", 96), ("decode", 256), ("decode", 1), ("prefill", 1)]
        return [Case(phase, batch, length, device) for phase, batch in sizes]  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    return [
        Case(phase, batch, length, device, threads)  # type: ignore[arg-type]
        for phase, batch in (("prefill", 1), ("prefill", 8), ("decode", 1))
    ]


def models_of(
    name: str, structure: Path | None = None, run: Path | None = None
) -> dict[str, tuple[Transformer, str]]:
    """Ancestor, uniform and compressed model of a work, each with the origin of its weights."""
    work = WORKS[name]
    if run:
        loaded = load_model(run)
        if not isinstance(loaded, Transformer):
            raise UserError(f"{str(run)!r}: its model is a {type(loaded).__name__}; give a run of "
                            "the built-in transformer")  # fmt: skip
        compressed, origin = loaded, f"trained, {run}"
    else:
        compressed, origin = Transformer(structure_in(structure or ROOT / work.result)), "random"
    ancestor, uniform = work.plain_specs(work_per_token(compressed))
    if run:
        ancestor = load_spec(run / "initial.json")
    return {
        "ancestor": (Transformer(ancestor), "random"),
        "uniform": (Transformer(uniform), "random"),
        "compressed": (compressed, origin),
    }


def structure_in(path: Path) -> TransformerSpec:
    """The structure of a file, or of the first run of a file of results."""
    data = read_json(path)
    if isinstance(data, dict) and "runs" in data:
        found = [each["structure"] for each in data["runs"] if "structure" in each]
        if not found:
            raise UserError(f"{str(path)!r}: none of its runs has a structure")
        return TransformerSpec.from_dict(found[0])
    return load_spec(path)


def measure(
    name: str,
    models: Mapping[str, tuple[Transformer, str]],
    case: Case,
    engines: Sequence[str],
    repeats: int,
) -> tuple[list[Row], list[Row]]:
    """Rows of one case, all models and engines in turns, and what was impossible, with reasons."""
    actions: dict[str, Action] = {}
    rows, skipped = {}, []
    if case.threads:
        torch.set_num_threads(case.threads)
    for engine in engines:
        for model, (network, weights) in models.items():
            spec = network.spec()
            fitting = fitted(case, spec)
            row = {
                "work": name, "model": model, "engine": engine, "phase": case.phase,
                "batch": case.batch, "length": fitting.length, "device": case.device,
                "threads": case.threads, "dtype": str(case.dtype).removeprefix("torch."),
                "weights": weights if engine != "transformers" else "random",
                "fma": work_per_token(network),
            }  # fmt: skip
            if fitting.last:
                row["logits"] = "last"
            print(f"preparing {name} {case.phase} {case.batch}: {model} in {engine}", flush=True)
            try:
                check_memory(spec, fitting, free_bytes(case.device))
                action, facts = ENGINES[engine](network, fitting)
            except Impossible as error:
                skipped.append({**row, "reason": str(error)})
                continue
            except Exception as error:  # an engine of others may fail in any way
                if engine == "gaugelasso":
                    raise
                skipped.append({**row, "reason": _reason(error)})
                continue
            key = f"{engine} {model}"
            actions[key], rows[key] = action, {**row, **facts}
            rows[key]["calls"], rows[key]["tokens"] = fitting.calls, fitting.tokens
    print(f"measuring {len(actions)} of them in turns", flush=True)
    for key, failure in _failing(actions).items():
        del actions[key]
        skipped.append({**rows.pop(key), "reason": failure})
    for key, times in in_turns(actions, case.device, repeats).items():
        calls = rows[key].pop("calls")
        row, ms = rows[key], statistics.median(times)
        row["ms"], row["quartiles"] = ms / calls, [each / calls for each in quartiles(times)]
        row["tokens_per_s"] = 1000 * row.pop("tokens") / ms
    return list(rows.values()), skipped


def _failing(actions: Mapping[str, Action]) -> dict[str, str]:
    """What fails in its first calls, of other engines than ours: compilation comes that late."""
    failed = {}
    for key, action in actions.items():
        if key.startswith("gaugelasso"):
            continue
        try:
            for _ in range(3):
                action()
        except Exception as error:
            failed[key] = _reason(error)
    return failed


def _reason(error: Exception) -> str:
    """What failed, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def ratios(rows: Iterable[Row]) -> list[Row]:
    """By case: how much faster the compressed model is, best engine against best engine.

    Of engines of one precision: llama.cpp's float16 is not compared with float32. Rows of several
    `commits` did not take turns in one run, so a ratio between them is less certain.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in CASE), []).append(row)
    found = []
    for case, group in groups.items():
        best: dict[str, Row] = {}
        cache: dict[str, int] = {}
        ours: dict[tuple[str, str], float] = {}
        for row in group:
            ours[row["engine"], row["model"]] = row["tokens_per_s"]
            if row["model"] not in best or row["ms"] < best[row["model"]]["ms"]:
                best[row["model"]] = row
            if row["engine"] == "gaugelasso" and "cache_bytes_per_token" in row:
                cache[row["model"]] = row["cache_bytes_per_token"]

        def over(model: str, best: dict[str, Row] = best) -> float | None:
            if "compressed" not in best or model not in best:
                return None
            return best[model]["ms"] / best["compressed"]["ms"]

        pair = [ours.get((engine, "ancestor")) for engine in ("gaugelasso", "transformers")]
        found.append({
            **dict(zip(CASE, case, strict=True)),
            "over_ancestor": over("ancestor"),
            "over_uniform": over("uniform"),
            "ancestor_over_transformers": pair[0] / pair[1] if pair[0] and pair[1] else None,
            "best": {model: row["engine"] for model, row in best.items()},
            "cache_bytes_per_token": cache,
            "commits": sorted({row["commit"] for row in group if "commit" in row}),
        })  # fmt: skip
    return found


def save(path: Path, device: str, rows: Sequence[Row], skipped: Sequence[Row]) -> list[Row]:
    """Write the rows, in place of those of the same case, and return all of the file."""
    kept = read_json(path) if exists(path) else {}

    def merged(kind: str, new: Sequence[Row]) -> list[Row]:
        names = {_name(row) for row in [*rows, *skipped]}
        return [*(row for row in kept.get(kind, []) if _name(row) not in names), *new]

    every = merged("rows", rows)
    found = environment(device)
    about = {key: found[key] for key in ("commit", "hardware", "date", "torch", "python")}
    for row in rows:  # rows of another commit may stand beside these
        row["commit"] = found["commit"]
    make_folder(path.parent)
    content = {**about, "rows": every, "skipped": merged("skipped", skipped)}
    write_json(path, {**content, "ratios": ratios(every)})
    return every


def _name(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in KEYS)


def show(rows: Sequence[Row], skipped: Sequence[Row]) -> None:
    for row in rows:
        threads = f", {row['threads']} threads" if row["threads"] else ""
        where = f"{row['phase']} {row['batch']}x{row['length']} {row['device']}{threads}"
        low, high = row["quartiles"]
        cache = row.get("cache_bytes_per_token", "")
        print(
            f"{row['work']:10} {where:34} {row['model']:11} {row['engine']:13} "
            f"{row['ms']:10.4f} ms ({low:.4f} to {high:.4f}) {row['tokens_per_s']:14,.0f}/s {cache}"
        )
    for row in skipped:
        print(f"{row['work']:10} {row['phase']} {row['model']} {row['engine']}: {row['reason']}")
    for each in ratios(rows):
        names = ("over_ancestor", "over_uniform", "ancestor_over_transformers")
        shown = [f"{name} {each[name]:.2f}" for name in names if each[name] is not None]
        if shown:
            runs = " (rows of several commits)" if len(each["commits"]) > 1 else ""
            print(f"  {each['work']} {each['phase']} {each['batch']}: {', '.join(shown)}{runs}")


def default_path(device: str) -> Path:
    path = ROOT / default_file(device)
    return path.with_name(f"serving_{path.name}")


def named_paths(words: Sequence[str]) -> dict[str, Path]:
    """WORK=PATH pairs."""
    found = {}
    for word in words:
        work, _, path = word.partition("=")
        if work not in WORKS or not path:
            raise UserError(f"{word!r}: give WORK=PATH, with WORK one of {', '.join(WORKS)}")
        if not exists(Path(path)):
            raise UserError(f"{word!r}: {path!r} does not exist")
        found[work] = Path(path)
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--runs", nargs="*", default=[], metavar="WORK=RUN")
    parser.add_argument("--structures", nargs="*", default=[], metavar="WORK=JSON")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--phases", nargs="+", choices=["prefill", "decode"])
    parser.add_argument("--batches", nargs="+", type=int, help="Only cases of these batch sizes.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=512, help="At most the model's length.")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    try:
        runs, structures = named_paths(given.runs), named_paths(given.structures)
    except UserError as error:
        parser.error(str(error))
    path = given.out or default_path(given.device)
    end = time.monotonic() + given.seconds
    every: list[Row] = []
    for name in given.works:
        models = models_of(name, structures.get(name), runs.get(name))
        for case in cases(given.device, given.length):
            if given.phases and case.phase not in given.phases:
                continue
            if given.batches and case.batch not in given.batches:
                continue
            if time.monotonic() >= end:
                print(f"stopped after {given.seconds:g} s; {path} has what was measured")
                return
            rows, skipped = measure(name, models, case, given.engines, given.repeats)
            every = save(path, given.device, rows, skipped)
            show(rows, skipped)
            gc.collect()  # engines of the last case
            if given.device.startswith("cuda"):  # its graphs and caches
                torch._dynamo.reset()
                gc.collect()
                torch.cuda.empty_cache()
    print(f"{len(every)} rows in {path}")


if __name__ == "__main__":
    main()
