"""ONNX files run in onnxruntime as the model does.

Both kinds of GELU, and biases: tests/importing/test_bert.py and test_vit.py.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.export import export
from gaugelasso.inference import InferenceModel
from tests.export.sources import (
    card_example,
    greedy,
    page_examples,
    run_example,
    spread_of,
    tiny,
    write_run,
)

TOKENS = 256  # of `tiny`: no other tensor of a model with one layer is as large as their table


# One test, because an export takes seconds.
def test_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With RoPE, an MLP, a tied head, norms of heads and a window.

    `export` compares it with a cache, padded.
    """
    monkeypatch.chdir(tmp_path)
    also = {"tied_head": True, "tied_mean": True, "head_bias": True, "qk_norm": True}
    model = tiny(1, also, windows=(5,), d_k=8)
    torch.nn.init.normal_(model.classifier.mean, generator=torch.Generator().manual_seed(1))
    assert [op.kind for op in model.spec().operators] == ["attention", "mlp"]
    stages: list[str] = []
    done = export(write_run(Path("runs/small"), model), "onnx", say=stages.append)
    files = ("model.onnx", "model_without_past.onnx")
    assert stages == [f"{stage} {name}" for name in files for stage in ("tracing", "comparing")]
    assert done.deviation < 1e-4
    check_table(done.folder)
    program = card_example(done.folder)
    assert program in page_examples()
    assert run_example(program) == greedy(model, [list(b"The ")], 20)[0]
    check_names(done.folder)
    check_padding(done.folder, model)


def session_of(path: Path) -> Any:
    import onnxruntime  # above, it would be imported by every worker

    return onnxruntime.InferenceSession(path)


def check_names(folder: Path) -> None:
    session = session_of(folder / "model.onnx")
    shapes = {each.name: each.shape for each in session.get_inputs()}
    pair = ["past_key_values.0.key", "past_key_values.0.value"]
    assert list(shapes) == ["input_ids", "attention_mask", "position_ids", *pair]
    assert shapes["input_ids"] == ["batch", "sequence_length"]
    assert shapes[pair[0]][::2] == ["batch", "past_sequence_length"]
    outputs = [each.name for each in session.get_outputs()]
    assert outputs == ["logits", "present.0.key", "present.0.value"]


def check_table(folder: Path) -> None:
    """Both files hold the table of the tokens once, which is also the head."""
    import onnx  # above, it would be imported by every worker

    for name in ("model.onnx", "model_without_past.onnx"):
        held = onnx.load(folder / name).graph.initializer
        assert len([each for each in held if math.prod(each.dims) >= 2 * TOKENS]) == 1


@torch.inference_mode()
def check_padding(folder: Path, model: Any) -> None:
    """Whole sequences, padded on either side, without past."""
    session = session_of(folder / "model_without_past.onnx")
    served = InferenceModel(model)
    tokens = torch.randint(256, (4, 11), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([11, 1, 4, 10])
    places = np.arange(11)
    for side in ("left", "right"):
        count = lengths.numpy()[:, None]
        mask = places >= 11 - count if side == "left" else places < count
        inputs = {
            "input_ids": tokens.numpy(),
            "attention_mask": mask.astype(np.int64),
            "position_ids": np.clip(mask.cumsum(1) - 1, 0, None),
        }
        (logits,) = session.run(None, inputs)
        kept = torch.from_numpy(mask)
        expected = served(tokens, lengths, padding=side)[kept]  # type: ignore[arg-type]
        assert spread_of(model, torch.from_numpy(logits)[kept], expected) < 1e-4


def test_a_masked_autoencoder_and_a_refused_precision(tmp_path: Path) -> None:
    model = tiny(
        layers=1, input_kind="masked_patches", causal=False, rope=False, inputs=6, outputs=6
    )
    run = write_run(tmp_path / "run", model, {"name": "mae"})
    with pytest.raises(UserError, match="onnxruntime has no such products on a CPU"):
        export(run, "onnx", tmp_path / "out", "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    folder = export(run, "onnx", tmp_path / "out").folder
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.onnx"]
    names: dict[str, Any] = {}
    exec(card_example(folder), names)
    expected = InferenceModel(model)(torch.zeros(1, 24, 7))
    assert spread_of(model, torch.from_numpy(names["outputs"]), expected) < 1e-4
