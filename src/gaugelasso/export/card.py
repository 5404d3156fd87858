"""The model card of an export: what the model is, what it was trained on, and how to load it."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from gaugelasso.export.examples import example, reads_tokenizer
from gaugelasso.export.source import Source
from gaugelasso.files.durable import write_new
from gaugelasso.models import AttentionSpec, MlpSpec
from gaugelasso.runs.units import noun
from gaugelasso.version import __version__

NAME = "README.md"
_NEEDS = {
    "onnx": "`pip install onnxruntime numpy`",
    "pt2": "`pip install torch numpy`, the version of torch below",
    "hf": "`pip install torch transformers`. The folder has its own modelling code, which "
    "`trust_remote_code=True` allows transformers to run",
    "llama": "`pip install torch transformers`. The model is a `LlamaForCausalLM`, without code of "
    "its own",
    "gguf": "[llama.cpp](https://github.com/ggml-org/llama.cpp): `llama-completion -m model.gguf`; "
    "or llama-cpp-python; or, as here, `pip install gaugelasso`",
    "native": "`pip install gaugelasso`",
}
_FRONT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [gaugelasso, compressed]
---

"""


def write_card(
    source: Source, form: str, folder: Path, out: Path, dtype: torch.dtype, deviation: float
) -> None:
    """Write README.md; `out` is the name that the folder gets."""
    precision = str(dtype).removeprefix("torch.")
    sections = [
        f"# {source.run.name}, {form}",
        f"A transformer that [gaugelasso](https://pypi.org/project/gaugelasso/) {_made(source)}, "
        f"as `{form}` in {precision}.",
        "## Load it",
        f"Needs {_NEEDS[form]}.{_needs_tokenizers(source, form)}",
        f"```python\n{example(source, form, out, dtype)}```",
        _inputs(source),
        "## Figures",
        _figures(source),
        *([] if source.is_imported else _settings(source)),
        "## Structure",
        _structure(source),
        "## Origin",
        _origin(source, deviation),
    ]
    text = (_FRONT if form in ("hf", "llama") else "") + "\n\n".join(sections) + "\n"
    write_new(folder / NAME, [text.encode(errors="backslashreplace")])


def _needs_tokenizers(source: Source, form: str) -> str:
    return " For text also `pip install tokenizers`." if reads_tokenizer(source, form) else ""


def _made(source: Source) -> str:
    if source.is_imported:
        return f"imported from `{source.config['task'].get('source')}`"
    return f"compressed while it trained on the task `{source.task}`"


def _settings(source: Source) -> list[str]:
    target = source.config.get("target", {}).items()
    # Other keys may be 0, as above_full.
    named = [row for row in target if row[1] is not None and row != ("fma", 0)]
    return [
        "## Target",
        _table(("key", "value"), named),
        "## Data",
        _table(("key", "value"), source.config["task"].items()),
    ]


def _inputs(source: Source) -> str:
    spec = source.spec
    if spec.input_kind != "tokens":
        last = ", and 1 where the patch is hidden" if spec.input_kind == "masked_patches" else ""
        return (
            f"Inputs are sequences of up to {spec.length} patches of {spec.inputs} values{last}; "
            f"outputs are {spec.outputs} values for each."
        )
    outputs = f"Outputs are {spec.outputs} logits for each."
    inputs = f"Inputs are up to {spec.length} tokens from 0 to {spec.inputs - 1}"
    if source.has_tokenizer:
        return f"{inputs}: those of the model's tokenizer. {outputs}"
    meaning = "the bytes of a text in UTF-8" if source.is_text else f"those of `{source.task}`"
    return f"{inputs}: {meaning}. There is no token that begins or ends a text. {outputs}"


def _figures(source: Source) -> str:
    if source.is_imported:
        count = sum(parameter.numel() for parameter in source.model.parameters())
        return _table(("figure", "value"), [("parameters", count), *_cache(source)])
    found = source.summary
    metric = found.get("metric")
    counted = str(found.get("accounting"))
    work = "work per token" if noun(counted) == "FMA" else "cost"
    place = str(found.get("evaluated_on", "held-out"))
    loss, measured = found.get("loss"), "loss"
    scored: list[tuple[str, Any]] = []
    if isinstance(metric, dict):
        scored = [(str(metric.get("name")), metric.get("value"))]
    if source.is_own_loop:  # says where, and without a metric has its loss there
        measured = f"loss on {place}"
        scored = scored if found.get("metric_target") is not None else []
    else:
        place = f"{place} data"
    rows: list[tuple[str, Any]] = [
        (measured, loss),
        *scored,
        *(found["figures"].items() if isinstance(found.get("figures"), dict) else []),
        ("target held", found.get("held")),
        (f"{work} before ({noun(counted)})", found.get("fma_initial")),
        (f"{work} ({noun(counted)})", found.get("fma_final")),
        ("compression", found.get("compression")),
        ("parameters before", found.get("parameters_initial")),
        ("parameters", found.get("parameters_final")),
    ]
    rows += _cache(source)
    where = f"Measured on {place} by the run, in "
    where += f"{found.get('precision', 'float32')}; work in the accounting "
    return f"{where}`{found.get('accounting')}`.\n\n" + _table(("figure", "value"), rows)


def _cache(source: Source) -> list[tuple[str, Any]]:
    served = source.served()
    if not served.generates:
        return []
    return [("cache per token (bytes, float32)", served.cache_bytes_per_token)]


def _structure(source: Source) -> str:
    spec = source.spec
    head = ("operator", "reads", "heads", "key/value heads", "d_k", "d_v", "filters", "writes")
    rows: list[Sequence[Any]] = [("embedding", *[""] * 6, len(spec.embed))]
    for op in spec.operators:
        inner: Sequence[Any]
        if isinstance(op, MlpSpec):
            inner = ("", "", "", "", op.filters)
        else:
            assert isinstance(op, AttentionSpec)
            d_k = op.keys if op.frequencies is None else 2 * op.keys
            inner = (op.heads, op.kv_heads, d_k, op.values, "")
        rows.append((op.name, len(op.reads), *inner, len(op.writes)))
    rows.append(("classifier", len(spec.classify), *[""] * 4, spec.head_hidden or "", ""))
    tied = " The map of the classifier is the table of the embedding." if spec.tied_head else ""
    norms = " A LayerNorm over all sites follows the embedding and each operator."
    return (
        f"A residual stream of {len(spec.sites)} sites. Every operator reads some of them and adds "
        f"to some.{tied}{norms if spec.post_norm else ''}\n\n{_table(head, rows)}"
    )


def _origin(source: Source, deviation: float) -> str:
    made = source.environment
    rows = [
        ("trained by", made.get("command")),
        ("on", made.get("hardware")),
        ("date", made.get("date")),
        ("commit", made.get("commit")),
        *([] if source.is_own_loop else [("seed", source.summary.get("seed"))]),
        ("steps", source.summary["steps"]),
        ("exported by gaugelasso", __version__),
        ("torch of the export", torch.__version__),
        ("largest deviation from the float32 model, of the outputs' spread", f"{deviation:.2g}"),
    ]
    return _table(("what", "value"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(each) for each in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")
