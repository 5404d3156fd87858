"""Writes run folders for tests: two layers, a hundred steps, two drops."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

INITIAL = {"d_ai": 8, "d_k": 4, "d_v": 8, "d_ao": 8, "d_mi": 8, "d_f": 16, "d_mo": 8}
ATTENTION = ("d_ai", "d_k", "d_v", "d_ao")
STEPS, COOLDOWN, LOG_EVERY = 100, 20, 10
NEXT = [
    {"axis": "operators.mlp_0.d_f", "index": 3, "price": 24.0, "utility_per_fma": 0.012345},
    {"axis": "D", "index": 5, "price": 1066.0, "utility_per_fma": 0.5},
]


def initial_widths(layers: int) -> dict[str, int]:
    widths = {"embedding.d_e": 8}
    for depth in range(layers):
        for kind, width in INITIAL.items():
            operator = "attention" if kind in ATTENTION else "mlp"
            widths[f"operators.{operator}_{depth}.{kind}"] = width
    return {**widths, "classifier.d_c": 8, "D": 8}


def final_widths(
    layers: int, kept: dict[tuple[str, int], int], removed: Collection[str] = ()
) -> dict[str, int]:
    """The initial widths with `kept`, (kind, depth) -> width, and without `removed` operators."""
    widths = initial_widths(layers)
    for (kind, depth), width in kept.items():
        operator = "attention" if kind in ATTENTION else "mlp"
        widths[f"operators.{operator}_{depth}.{kind}"] = width
    return {name: w for name, w in widths.items() if not set(removed) & set(name.split("."))}


def two_drops(layers: int, seed: int) -> list[dict[str, Any]]:
    """Step 20 drops filters of the first MLP; step 40 the last attention and two sites."""
    first = {**initial_widths(layers), "operators.mlp_0.d_f": 4 + seed % 2}
    removed = f"operators.attention_{layers - 1}"
    second = {name: w for name, w in first.items() if not name.startswith(removed)} | {"D": 6}
    return [
        event(10, 1000.0, 1000.0, {}, [], initial_widths(layers)),
        event(20, 1000.0, 600.0, {"operators.mlp_0.d_f": 12}, [], first),
        event(40, 600.0, 100.0 + seed, {f"{removed}.d_ai": 8, "D": 2}, [removed], second),
    ]


def event(
    step: int,
    before: float,
    after: float,
    dropped: dict[str, int],
    removed: list[str],
    widths: dict[str, int],
) -> dict[str, Any]:
    return {
        "step": step,
        "fma_before": before,
        "fma": after,
        "dropped": dropped,
        "prices": dict.fromkeys(dropped, 1.0),
        "removed": removed,
        "widths": widths,
        "seconds": 0.01,
        "loss_before": 0.04,
        "loss_balanced": 0.041,
        "loss_after": 0.0625 if dropped else 0.041,
        "refused": False,
    }


def make_run(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    events: list[dict[str, Any]] | None = None,
    rows: int = STEPS // LOG_EVERY,
    finished: bool = True,
    task: str = "retrieval",
    metric: str = "accuracy",
    loss: float = 0.03,
    next_to_go: list[dict[str, Any]] | None = None,
    method: str | None = None,
    changes: dict[str, dict[str, Any]] | None = None,
) -> Path:
    """Write one run folder; `changes` replaces settings of its config.

    Without `next_to_go` the summary is as early builds wrote it.
    """
    events = two_drops(layers, seed) if events is None else events
    operators = [
        {"kind": kind, "depth": depth, "heads": 4, "kv_heads": 2}
        for depth in range(layers)
        for kind in ("attention", "mlp")
    ]
    config: dict[str, dict[str, Any]] = {
        "task": {"name": task, "length": 16},
        "model": {"width": 8, "layers": layers, "rope": True},
        "target": {"loss": 0.05, "fma": 0.0},
        "compress": {"accounting": "fma", "interval": 10},
        "train": {"seed": seed, "steps": STEPS, "cooldown": COOLDOWN, "eval_every": 20},
    }
    for section, values in (changes or {}).items():
        config[section] = {**config[section], **values}
    environment = {
        "gaugelasso": "0.1.0",
        "commit": "abc123",
        "command": f"gaugelasso train demo.toml --set train.seed={seed}",
        "date": f"2026-01-0{1 + seed % 9}T00:00:00+00:00",
        "hardware": "CPU, 2 cores",
        "torch": "2.9",
    }
    widths = initial_widths(layers)
    path.mkdir(parents=True)
    _write(path / "config.json", config)
    _write(path / "environment.json", environment)
    structure = {"layers": layers, "operators": operators}
    initial = {"fma": 1000.0, "widths": widths, "structure": structure}
    _write(path / "initial.json", {"metric": {"name": metric, "lower_is_better": False}, **initial})
    metrics = [_row(index + 1, seed, metric, events) for index in range(rows)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    if events:
        (path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    final = events[-1] if events else {"fma": 1000.0, "widths": widths}
    if finished:
        summary = {
            "task": task,
            "seed": seed,
            "steps": STEPS,
            "accounting": config["compress"]["accounting"],
            "fma_initial": 1000.0,
            "fma_final": final["fma"],
            "compression": 1000.0 / final["fma"],
            "loss_target": 0.05,
            "loss": loss,
            "metric": {"name": metric, "value": 0.9996},
            "target_reached_step": 15,
            "frozen_step": None,
            "training_fma": 40_000.0,
            "parameters_initial": 2000,
            "parameters_final": 500,
            "wall_s": 12.5,
            "device": "cpu",
            "precision": "float32",
            "widths": final["widths"],
            "structure": {"layers": layers, "operators": operators[:1]},
        }
        extra: dict[str, Any] = {} if next_to_go is None else {"next_to_go": next_to_go}
        extra |= {} if method is None else {"method": method}
        _write(path / "summary.json", summary | extra)
    return path


def _row(number: int, seed: int, metric: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    step = number * LOG_EVERY
    fma = next((e["fma"] for e in reversed(events) if e["step"] <= step), 1000.0)
    return {
        "step": step,
        "phase": "cooldown" if step > STEPS - COOLDOWN else "compression",
        "loss": 5.0 / number**2 + 0.001 * seed,
        metric: None if step < 20 else 0.5 + step // 20 * 20 / 250,
        "fma": fma,
        "parameters": 2000 if fma == 1000 else 500,
        "sites": 8,
        "operators": 4,
        "rho": 0.0,
        "lr": 0.001,
        "step_ms": 20.0 if fma > 500 else 5.0,
        "wall_s": 0.1 * step,
    }


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))
