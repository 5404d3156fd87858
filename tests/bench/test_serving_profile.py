"""The profile of a served model: every part once, with its work, and all times in the file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import serving, serving_profile
from benchmarks.serving_case import Case

from gaugelasso.bench.measure import work_per_token
from gaugelasso.inference import Form, InferenceModel
from gaugelasso.inference.operators import Mlp
from gaugelasso.kernels.tiles import JOINED
from gaugelasso.models import Transformer
from tests.bench.test_serving import uniform


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@torch.inference_mode()
def test_the_parts_do_the_work_of_the_model(phase: Any) -> None:
    model = Transformer(uniform(rope=True))
    served = InferenceModel(model)
    case = Case(phase, 3, 20, "cpu")
    parts = list(serving_profile.parts(served, case))
    assert [(part.operator, part.kind) for part in parts[:6]] == [
        ("embedding", "embed"),
        ("attention_0", "read"),
        ("attention_0", "attention"),
        ("attention_0", "write"),
        ("mlp_0", "read+swiglu"),
        ("mlp_0", "write"),
    ]
    for part in parts:
        part.action()
    # Gains, scales and rotations are work of the accounting alone, and attention of the phase.
    products = sum(part.flops for part in parts if part.kind != "attention")
    tokens = 3 * (20 if phase == "prefill" else 1)
    assert 0.5 < products / 2 / tokens / work_per_token(model) < 1
    attention = next(part.flops for part in parts if part.kind == "attention")
    pairs = 20 * 21 / 2 if phase == "prefill" else 20
    assert attention == 2 * 3 * 2 * pairs * (4 + 4)


@torch.inference_mode()
def test_an_operator_in_one_kernel_is_one_part() -> None:
    model = Transformer(uniform(rope=True))
    case = Case("decode", 3, 20, "cpu")
    whole, apart = (
        list(serving_profile.parts(InferenceModel(model, forms=Form(step=step)), case))  # type: ignore[arg-type]
        for step in ("whole", "parts")
    )
    assert [(part.operator, part.kind) for part in whole[:3]] == [
        ("embedding", "embed"), ("attention_0", "step"), ("mlp_0", "step"),
    ]  # fmt: skip
    for part in whole:
        part.action()
    for name in ("attention_0", "mlp_0"):
        flops = [sum(p.flops for p in parts if p.operator == name) for parts in (whole, apart)]
        assert flops[0] == flops[1] > 0


@torch.inference_mode()
def test_an_mlp_in_one_kernel_is_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(uniform(rope=True))
    case = Case("prefill", 3, 20, "cpu")
    served = InferenceModel(model, forms=Form(write="fused", joined=JOINED[0]))
    apart = list(serving_profile.parts(served, case))
    monkeypatch.setattr(Mlp, "joins", lambda self, x: True)
    joined = list(serving_profile.parts(served, case))
    kinds = {
        kind: [part.kind for part in parts if part.operator == "mlp_0"]
        for kind, parts in (("apart", apart), ("joined", joined))
    }
    assert kinds == {"apart": ["read+swiglu", "write"], "joined": ["joined"]}
    flops = [sum(p.flops for p in parts if p.operator == "mlp_0") for parts in (apart, joined)]
    assert flops[0] == flops[1] > 0


def test_a_profile_is_written_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"compressed": (Transformer(uniform()), "random")}
    monkeypatch.setattr(serving_profile, "models_of", lambda work: models)
    out = tmp_path / "profile.json"
    words = ["--works", "demo", "--models", "compressed", "--device", "cpu", "--repeats", "1",
             "--cases", "prefill:2", "decode:1", "--out", str(out)]  # fmt: skip
    serving_profile.main(words)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["phase"], row["batch"], row["length"]) for row in rows] == [
        ("prefill", 2, 20), ("decode", 1, 20),
    ]  # fmt: skip
    for row in rows:
        assert row["ms"] > 0
        assert sum(each["share"] for each in row["kernels"]) == pytest.approx(1)
        assert len(row["operators"]) == 1 + 2 * (3 + 2) + 1
        assert all(each["ms"] > 0 for each in row["operators"])
        assert set(row["alternatives_ms"]["mlp_0"]) == {"read", "write"}
    shown = capsys.readouterr().out
    assert "compressed prefill 2x20" in shown
    assert "mlp read+swiglu" in shown


def test_a_wrong_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving_profile.main(["--cases", "train:3"])
    assert "'train:3': give prefill:BATCH or decode:BATCH" in capsys.readouterr().err
    assert set(serving_profile.MODELS) == set(serving.models_of("demo"))
