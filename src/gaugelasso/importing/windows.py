"""Sliding windows of a Hugging Face folder: how many keys a query sees, and in which layers."""

from dataclasses import dataclass

from gaugelasso.importing.source import Settings

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Windows:
    """A window of `size` tokens in the layers from `first` on, or in those that `layers` says."""

    size: int
    first: int = 0
    layers: tuple[bool, ...] | None = None

    def of(self, layer: int) -> int | None:
        if self.layers is not None:
            return self.size if self.layers[layer] else None
        return self.size if layer >= self.first else None


def everywhere(config: Settings) -> Windows | None:
    """`sliding_window` of all layers; None if it is null or not shorter than the context."""
    if config.table.get("sliding_window") is None:
        return None
    return _shorter(config, Windows(config.whole("sliding_window")))


def of_some_layers(config: Settings) -> Windows | None:
    """As Qwen models have them: `use_sliding_window`, in the layers that `layer_types` names.

    Without these, in all layers after the first `max_window_layers`.
    """
    kinds = layer_kinds(config)
    used = config.switch("use_sliding_window", False)
    used = used and config.table.get("sliding_window") is not None
    if kinds is not None and any(kinds) and not used:
        raise config.error("layer_types", "sliding layers need use_sliding_window = true")
    if not used:
        return None
    size, key = config.whole("sliding_window"), "max_window_layers"
    if kinds is not None:
        return _shorter(config, Windows(size, layers=kinds))
    # 0 is a number of layers too: all of them slide.
    first = 0 if config.number(key) == 0 else config.whole(key)
    return _shorter(config, Windows(size, first))


def layer_kinds(config: Settings) -> tuple[bool, ...] | None:
    """Of each layer, whether it slides, by `layer_types`; None without that key."""
    kinds = config.table.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != config.whole("num_hidden_layers"):
        raise config.error("layer_types", "must be a list with the kind of each layer")
    if any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise config.error("layer_types", f"only {_FULL!r} and {_SLIDING!r} can be imported")
    return tuple(kind == _SLIDING for kind in kinds)


def _shorter(config: Settings, windows: Windows) -> Windows | None:
    return windows if windows.size < config.whole("max_position_embeddings") else None
