"""The program on a model card that loads a form and uses it, complete enough to paste."""

from pathlib import Path

import torch

from gaugelasso.export.source import Source
from gaugelasso.export.traced import has_past

# Of a text, and of other tokens; a model of another task knows what its tokens mean.
_TEXT, _TOKENS = b"The ", (0, 1, 2, 3)
_NEW = 20


def example(source: Source, form: str, out: Path, dtype: torch.dtype) -> str:
    """Greedy generation if the model generates, else the outputs of one sequence."""
    spec = source.spec
    if not (spec.causal and spec.input_kind == "tokens" and spec.outputs <= spec.inputs):
        return _WHOLE[form].format(out=out, inputs=_blank(source), **_kinds(dtype))
    given = tuple(_TEXT) if source.is_text else tuple(min(t, spec.inputs - 1) for t in _TOKENS)
    prompt = given[: max(1, spec.length - 1)]
    if source.is_text:
        ids, shown = f"list({bytes(prompt)!r})", 'bytes(new_tokens).decode(errors="replace")'
    else:
        ids, shown = str(list(prompt)), "new_tokens"
    new = max(1, min(_NEW, spec.length - len(prompt)))
    names = {"out": out, "prompt": ids, "new": new, "shown": shown, **_kinds(dtype)}
    if form == "hf":
        text = bytes(prompt).decode()
        return (_HF_TEXT if source.is_text else _HF_TOKENS).format(text=f'"{text}"', **names)
    if form != "native" and not has_past(source.served()):  # no key or value to pass on
        return _WHOLE[form].format(inputs=_blank(source), **names)
    return _GENERATE[form].format(**names)


def _kinds(dtype: torch.dtype) -> dict[str, str]:
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "numpy": f"np.{name}"}


def _blank(source: Source) -> str:
    """The shape of inputs, and their type where it is not that of the weights."""
    spec = source.spec
    if spec.input_kind == "tokens":
        return f"(1, {spec.length}), dtype=int64"
    return f"(1, {spec.length}, {spec.inputs + (spec.input_kind == 'masked_patches')})"
