"""Tiny tokenizers, trained on a few words, as tokenizer.json files."""

from pathlib import Path
from typing import Any

WORDS = (
    "The quick brown fox jumps over the lazy dog, été after été. It's 12 o'clock and the dogs sleep"
    ".\n\nA fox and a dog were in the house; the fox was quick, the dog was not.\n"
)


def byte_level(size: int = 300, more: list[str] | None = None) -> Any:
    """Byte-level BPE, as GPT-2 has it, with special tokens at the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.add_tokens(more or [])
    return tokenizer


def with_fallback() -> Any:
    """BPE with byte fallback and a space before the text, as Llama 2 has it."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = [
        "▁",
        *"abcdefghijklmnopqrstuvwxyzTIA,.;'",
        "th",
        "the",
        "▁the",
        "▁a",
        "▁f",
        "▁fox",
        "ox",
    ]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: number for number, token in enumerate(["<unk>", *bytes_, *words])}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("▁", "a"),
        ("o", "x"),
        ("▁", "f"),
        ("▁f", "ox"),
    ]
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def word_piece() -> Any:
    """WordPiece in lower case, as BERT has it: no token says which bytes it stands for."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=60, show_progress=False, special_tokens=special)
    tokenizer.train_from_iterator([WORDS], trainer)
    # The trainer finds the same tokens in every process, and numbers them in another order.
    tokens = [*special, *sorted(tokenizer.get_vocab().keys() - {*special})]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    return tokenizer


def save(tokenizer: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path
