"""The tokenizer of a GGUF file, which is in its metadata, as files of the package tokenizers.

Byte-level BPE only (`tokenizer.ggml.model = "gpt2"`), with the ways of splitting a text that are
listed in `SPLITS`. The tokenizer of another kind is left out, with the reason.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gaugelasso.errors import UserError, first_line
from gaugelasso.files.tokenizer import NAME, SETTINGS, tokenizers_library
from gaugelasso.importing.source import Settings

_KEY = "tokenizer.ggml."
_MOST_TOKENS = 2**21
NORMAL, UNUSED = 1, 5
# Types of tokens that are found in a text as they are: whether they are special -> the type.
TYPES = {True: 3, False: 4}
# Words with the character before them, numbers of some digits, and punctuation with line breaks.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Array:
    """An array of the metadata, by its place in the file."""

    kind: int
    count: int
    start: int


def tokenizer_files(settings: Settings, values: Callable[[Array], list]) -> dict[str, bytes] | str:
    """The files of the tokenizer, or why there are none; UserError if it is damaged."""
    table = settings.table
    kind, split = table.get(f"{_KEY}model"), table.get(f"{_KEY}pre")
    if kind != "gpt2" or split not in SPLITS:
        return (
            f"the tokenizer of kind {kind!r}, pre {split!r}, is not read; known are gpt2 with "
            f"{', '.join(SPLITS)}"
        )
    arrays = [_array(settings, _KEY + name) for name in ("tokens", "merges", "token_type")]
    try:
        library = tokenizers_library()
    except UserError as error:
        return str(error)
    try:
        found = _build(library, split, *map(values, arrays))
    except (KeyboardInterrupt, SystemExit):
        raise
    # A panic of the library derives from BaseException alone.
    except BaseException as error:
        raise UserError(
            f"{str(settings.path)!r}: its tokenizer is damaged ({first_line(error)})"
        ) from None
    about = _about(settings, found)
    if table.get(f"{_KEY}add_bos_token") is True and "bos_token" in about:
        first = about["bos_token"]
        found.post_processor = library.processors.TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, found.token_to_id(first))]
        )
    return {NAME: found.to_str().encode(), SETTINGS: json.dumps(about, indent=1).encode()}


def _array(settings: Settings, key: str) -> Array:
    array = settings.table.get(key)
    if not isinstance(array, Array) or array.count > _MOST_TOKENS:
        raise settings.error(key, f"must be an array of at most {_MOST_TOKENS:,} values")
    return array


def _build(library: Any, split: str, tokens: list[str], merges: list[str], types: list[int]) -> Any:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or len(types) != len(tokens):
        raise ValueError("a token appears twice, or its type is missing")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if not all(len(pair) == 2 for pair in pairs):
        raise ValueError("a merge is not of two tokens")
    found = empty(library, split, vocabulary, pairs)
    for special, kind in TYPES.items():
        names = [token for token, each in zip(tokens, types, strict=True) if each == kind]
        add = found.add_special_tokens if special else found.add_tokens
        add([library.AddedToken(name, special=special, normalized=False) for name in names])
    return found


def empty(
    library: Any,
    split: str,
    vocabulary: dict[str, int] | None = None,
    merges: list[tuple[str, ...]] | None = None,
) -> Any:
    """A tokenizer that splits a text in this way, without tokens that are found as they are."""
    # Such vocabularies have words that no merges make.
    whole = split == "llama-bpe"
    model = library.models.BPE(vocab=vocabulary or {}, merges=merges or [], ignore_merges=whole)
    found = library.Tokenizer(model)
    if split == "qwen2":
        found.normalizer = library.normalizers.NFC()
    found.pre_tokenizer = SPLITS[split](library)
    found.decoder = library.decoders.ByteLevel()
    return found


def _about(settings: Settings, found: Any) -> dict[str, Any]:
    """The settings of the tokenizer for transformers."""
    table = settings.table
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = table.get(f"{_KEY}{key}_token_id")
        if type(number) is int and (token := found.id_to_token(number)) is not None:
            about[f"{name}_token"] = token
    template = table.get("tokenizer.chat_template")
    return about | ({"chat_template": template} if isinstance(template, str) else {})


def _gpt2(library: Any) -> Any:
    return library.pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm(library: Any) -> Any:
    digits = library.pre_tokenizers.Digits(individual_digits=True)
    return library.pre_tokenizers.Sequence([digits, _gpt2(library)])


def _words(digits: str) -> Callable[[Any], Any]:
    def build(library: Any) -> Any:
        pre = library.pre_tokenizers
        words = pre.Split(library.Regex(_WORDS % digits), "isolated")
        return pre.Sequence([words, pre.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


# How a text is split into words -> what splits it.
SPLITS: dict[str, Callable[[Any], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _words("{1,3}"),
    "qwen2": _words(""),
}
