"""PyTorch programs: portable, and compiled by AOTInductor."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.export import export, to_pt2
from gaugelasso.inference import InferenceModel
from gaugelasso.models import Transformer, TransformerSpec
from tests.contract.models import GPT2
from tests.export.sources import (
    card_example,
    greedy,
    page_examples,
    run_example,
    spread_of,
    tiny,
    write_run,
)


# One test, because compiling takes many seconds.
def test_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as inductor  # above, it would cost every worker a second

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model = tiny(layers=1, heads=2, kv_heads=2)  # attention with RoPE, and an MLP
    assert [op.kind for op in model.spec().operators] == ["attention", "mlp"]
    # Less time to compile: no vector instructions (nor the programs that try them), no optimisation
    # of the wrapper, no line tables.
    settings = {
        "cpp.vec_isa_ok": False,
        "aot_inductor.precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.enable_line_tables": False,
    }
    stages: list[str] = []
    with inductor.patch(settings):
        done = export(write_run(Path("runs/small"), model), "pt2", device="cpu", say=stages.append)
    assert [stage.split(",")[0] for stage in stages] == [
        "tracing model.pt2",
        "comparing model.pt2",
        "compiling model.cpu.pt2",
        "comparing model.cpu.pt2",
    ]
    assert done.deviation < 1e-4
    program = card_example(done.folder)
    assert program in page_examples()
    expected = greedy(model, [list(b"The ")], 20)[0]
    assert run_example(program) == expected
    compiled = program.replace("# model = ", "model = ")
    assert compiled != program
    assert run_example(compiled) == expected


ENCODERS: dict[str, dict[str, Any]] = {
    "masked autoencoder": {"input_kind": "masked_patches", "inputs": 6, "outputs": 6},
    "classifier": {"input_kind": "patches", "inputs": 6, "outputs": 10},
}


@pytest.mark.parametrize("settings", ENCODERS.values(), ids=ENCODERS)
def test_what_does_not_generate_becomes_a_program_of_whole_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The portable program; compiling takes long, and nothing in it depends on the kind."""

    def not_compiled(program: Any, path: Path) -> Any:
        path.write_text("compiled")
        return program.module()

    monkeypatch.setattr(to_pt2, "_compiled", not_compiled)
    model = tiny(layers=1, causal=False, rope=False, **settings)
    done = export(write_run(tmp_path / "run", model), "pt2", tmp_path / "out", device="cpu")
    assert done.deviation < 1e-4
    names = sorted(path.name for path in done.folder.iterdir())
    assert names == ["README.md", "model.cpu.pt2", "model.pt2"]
    program = torch.export.load(done.folder / "model.pt2").module()
    masked = settings["input_kind"] == "masked_patches"
    for batch, length in ((1, 24), (3, 7)):
        patches = torch.randn(batch, length, 6 + masked)
        if masked:
            patches[..., -1] = (patches[..., -1] > 0).float()
        expected = model(patches).detach()
        assert expected.shape == (batch, length, settings["outputs"])
        assert spread_of(model, program(patches).detach(), expected) < 1e-4


@torch.inference_mode()
def test_keys_and_values_may_be_equally_wide() -> None:
    """As in imported models: the traced program takes sequences of any length, also of one.

    With the biases of GPT-2, and the norms of heads and the window of Qwen3.
    """
    spec = TransformerSpec.uniform(
        width=8, layers=1, heads=2, kv_heads=1, d_k=4, d_v=4, d_f=6, length=12, inputs=9, outputs=9
    )
    attention, mlp = spec.operators
    also: dict[str, Any] = {**GPT2, "qk_norm": True}
    operators = replace(attention, window=3), mlp
    model = Transformer(replace(spec, **also, operators=operators), seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    served = InferenceModel(model)
    program = to_pt2._traced(served).module()
    tokens, past, seen = torch.tensor([[3, 1, 4, 1, 5]]), served.empty_past(1), 0
    for new in (4, 1):
        mask = torch.ones(1, seen + new, dtype=torch.long)
        places = torch.arange(seen, seen + new)[None]
        logits, past = program(tokens[:, seen : seen + new], mask, places, past)
        seen += new
    assert spread_of(model, logits, model(tokens)[:, 4:]) < 1e-5


@torch.no_grad()
def test_values_may_be_wider_than_keys() -> None:
    """As compression leaves them, and one position is enough."""
    spec = TransformerSpec.uniform(
        width=8, layers=1, heads=2, d_k=2, d_v=3, d_f=6, length=12, inputs=6, outputs=6,
        causal=False, input_kind="patches",
    )  # fmt: skip
    model = Transformer(spec)
    program = to_pt2._traced(InferenceModel(model)).module()
    for length in (1, 2, 12):
        inputs = torch.randn(2, length, 6, generator=torch.Generator().manual_seed(0))
        assert spread_of(model, program(inputs), model(inputs)) < 1e-5


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = write_run(tmp_path / "run", tiny())
    with pytest.raises(UserError, match="needs the C\\+\\+ compiler 'no-such-compiler'"):
        export(run, "pt2", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
