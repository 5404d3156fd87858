"""A transformer whose layers all have different widths, for Hugging Face transformers.

Needs torch and transformers only. Every operator reads some of the sites of one residual stream,
normalises them, and adds its outputs to some of the sites. Gains and scales are already in the
maps. Shapes: B sequences, S tokens, T keys, D sites, H query heads, G key/value heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

EPS = 1e-20  # of a sum of squares, below which a token has no signal


class GaugelassoConfig(PreTrainedConfig):
    """Widths of every operator; see `operators`.

    `operators` is a list of tables, each with `name`, `kind` ("attention" or "mlp") and the numbers
    of sites that it `reads` and `writes`; an attention also with `heads`, `kv_heads`, `d_k`, `d_v`
    and the `frequencies` of its rotary pairs (or null), `bias` if queries, keys and values have
    biases, `qk_norm` if queries and keys are normalised in each head, and a `window` if a query
    sees no more keys than that; an mlp with `filters`, and `gelu` ("none" or "tanh", the
    approximation) if it is not a SwiGLU; `write_bias` if it writes biases. `tied_columns` has a
    table that is the head's map too, with `tied_mean` plus a mean of each row.
    """

    model_type = "gaugelasso"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 256,
        outputs: int = 256,
        hidden_size: int = 1,
        max_position_embeddings: int = 1,
        learned_positions: bool = False,
        classifier_reads: int = 1,
        rms_norm_eps: float = 0.0,
        classifier_bias: bool = False,
        tied_columns: int = 0,
        tied_mean: bool = False,
        operators: list[dict[str, Any]] | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.outputs = outputs
        self.hidden_size = hidden_size
        self.max_position_embeddings = max_position_embeddings
        self.learned_positions = learned_positions
        self.classifier_reads = classifier_reads
        self.rms_norm_eps = rms_norm_eps
        self.classifier_bias = classifier_bias
        self.tied_columns = tied_columns
        self.tied_mean = tied_mean
        self.operators = operators or []
        self.use_cache = use_cache
        # A cache has one layer for each attention operator; others may have been removed.
        self.num_hidden_layers = sum(op["kind"] == "attention" for op in self.operators)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class Normaliser(nn.Module):
    """n_j = x[s_j] / sqrt(eps + sum_i weight_i x[s_i]^2); 0 without signal."""

    sites: Tensor
    weight: Tensor

    def __init__(self, reads: int, eps: float):
        super().__init__()
        self.eps = eps
        self.register_buffer("sites", torch.zeros(reads, dtype=torch.long))
        self.register_buffer("weight", torch.zeros(reads))

    def normalised(self, x: Tensor) -> Tensor:
        picked = x.index_select(-1, self.sites)
        # A factor of a token with small values may be more than half precision holds.
        wide = picked.to(torch.promote_types(x.dtype, torch.float32))
        level = wide.square() @ self.weight.to(wide.dtype) + self.eps
        factor = torch.where(level > EPS, level.clamp(min=EPS).rsqrt(), 0.0)
        return (wide * factor[..., None]).to(x.dtype)


class Read(Normaliser):
    """maps^T n: [B, S, D] -> [B, S, outputs]."""

    def __init__(self, reads: int, outputs: int, eps: float):
        super().__init__(reads, eps)
        self.maps = nn.Parameter(torch.zeros(reads, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.normalised(x) @ self.maps


class Write(nn.Module):
    """x[t_j] += (maps^T h)_j + bias_j, where there is a bias."""

    sites: Tensor

    def __init__(self, inputs: int, op: dict[str, Any]):
        super().__init__()
        self.register_buffer("sites", torch.zeros(op["writes"], dtype=torch.long))
        self.maps = nn.Parameter(torch.zeros(inputs, op["writes"]))
        self.bias = nn.Parameter(torch.zeros(op["writes"])) if op.get("write_bias") else None

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        u = h @ self.maps
        return x.index_add(-1, self.sites, u if self.bias is None else u + self.bias)


class Embedding(nn.Module):
    """Tokens [B, S] -> the stream [B, S, D]; site d has a column of a tied table, or none."""

    column_of_site: Tensor

    def __init__(self, config: GaugelassoConfig):
        super().__init__()
        width, sites = config.tied_columns, config.hidden_size
        self.table = nn.Parameter(torch.zeros(config.vocab_size, width or sites))
        self.scale = nn.Parameter(torch.zeros(width)) if width else None
        columns = torch.zeros(sites, dtype=torch.long) if width else None
        self.register_buffer("column_of_site", columns)
        places = config.max_position_embeddings, sites
        self.positions = nn.Parameter(torch.zeros(places)) if config.learned_positions else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(tokens, self.table)
        if self.scale is not None:  # sites that are not written have one more column: zeros
            x = F.pad(x * self.scale, (0, 1)).index_select(-1, self.column_of_site)
        return x if self.positions is None else x + F.embedding(positions, self.positions)


class HeadNorm(nn.Module):
    """gain_c z_c / sqrt(eps + sum_c weight_c z_c^2) in each head, of queries and of keys."""

    weight: Tensor

    def __init__(self, d_k: int, heads: int, groups: int, eps: float):
        super().__init__()
        self.kinds, self.eps = [0] * heads + [1] * groups, eps
        self.gain = nn.Parameter(torch.zeros(2, d_k))
        self.register_buffer("weight", torch.zeros(2, d_k))

    def forward(self, qk: Tensor) -> Tensor:
        """[B, H + G, S, d_k] -> the same, normalised."""
        weight, gain = (each.float()[self.kinds, None] for each in (self.weight, self.gain))
        level = (qk.float().square() * weight).sum(-1, keepdim=True) + self.eps
        factor = torch.where(level > EPS, level.clamp(min=EPS).rsqrt(), 0.0)
        return (qk.float() * factor * gain).to(qk.dtype)


class Attention(nn.Module):
    """Attention with grouped keys; the softmax scale is in the map or the norm of the queries."""

    def __init__(self, op: dict[str, Any], layer: int, eps: float):
        super().__init__()
        self.layer = layer
        self.heads, self.groups = op["heads"], op["kv_heads"]
        self.d_k, self.d_v = op["d_k"], op["d_v"]
        columns = (self.heads + self.groups) * self.d_k + self.groups * self.d_v
        self.read = Read(op["reads"], columns, eps)
        self.bias = nn.Parameter(torch.zeros(columns)) if op.get("bias") else None
        self.window, self.norm = op.get("window"), None
        if op.get("qk_norm"):
            self.norm = HeadNorm(self.d_k, self.heads, self.groups, eps)
        self.write = Write(self.heads * self.d_v, op)
        # Not a buffer: the angles of late positions need float32, whatever the model is cast to.
        self._given = op["frequencies"]
        self._frequencies: Tensor | None = None

    def forward(
        self, x: Tensor, positions: Tensor, visible: Tensor, cache: DynamicCache | None
    ) -> Tensor:
        rows = self.read(x) if self.bias is None else self.read(x) + self.bias
        widths = [(self.heads + self.groups) * self.d_k, self.groups * self.d_v]
        qk, v = rows.split(widths, dim=-1)
        qk = qk.unflatten(-1, (self.heads + self.groups, self.d_k)).transpose(1, 2)
        v = v.unflatten(-1, (self.groups, self.d_v)).transpose(1, 2)
        qk = qk if self.norm is None else self.norm(qk)
        if self._given is not None:
            qk = self._rotated(qk, positions)
        q, k = qk.split([self.heads, self.groups], dim=1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        repeats = self.heads // self.groups
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        # Fused kernels want equal widths, and on a GPU multiples of 8.
        width = -(-max(self.d_k, self.d_v) // 8) * 8
        q, k, v = (F.pad(each, (0, width - each.shape[-1])) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, visible, scale=1.0)[..., : self.d_v]
        return self.write(x, mixed.transpose(1, 2).flatten(2))

    def _rotated(self, qk: Tensor, positions: Tensor) -> Tensor:
        if self._frequencies is None or self._frequencies.device != qk.device:
            self._frequencies = torch.tensor(self._given, dtype=torch.float32, device=qk.device)
        angles = (positions[..., None].float() * self._frequencies)[:, None]
        cos, sin = angles.cos().to(qk.dtype), angles.sin().to(qk.dtype)
        first, second = qk.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Mlp(nn.Module):
    """down(up(y) silu(gate(y)))."""

    def __init__(self, op: dict[str, Any], eps: float):
        super().__init__()
        self.read = Read(op["reads"], 2 * op["filters"], eps)
        self.write = Write(op["filters"], op)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.read(x).chunk(2, dim=-1)
        return self.write(x, F.silu(gate) * up)


class GeluMlp(nn.Module):
    """down(gelu(up(y) + bias))."""

    def __init__(self, op: dict[str, Any], eps: float):
        super().__init__()
        self.approximation = op["gelu"]
        self.read = Read(op["reads"], op["filters"], eps)
        self.bias = nn.Parameter(torch.zeros(op["filters"]))
        self.write = Write(op["filters"], op)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.read(x) + self.bias, approximate=self.approximation)
        return self.write(x, hidden)


class Classifier(nn.Module):
    def __init__(self, config: GaugelassoConfig):
        super().__init__()
        self.read = Read(config.classifier_reads, config.outputs, config.rms_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.outputs)) if config.classifier_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x) if self.bias is None else self.read(x) + self.bias


class TiedClassifier(Normaliser):
    """The map is the table of the embedding, perhaps plus means of its rows, after a gain."""

    def __init__(self, config: GaugelassoConfig):
        super().__init__(config.tied_columns, config.rms_norm_eps)
        width, outputs = config.tied_columns, config.outputs
        self.gain = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(outputs)) if config.classifier_bias else None
        self.mean = nn.Parameter(torch.zeros(outputs)) if config.tied_mean else None
        self.spread = nn.Parameter(torch.zeros(width)) if config.tied_mean else None

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        read = self.normalised(x) * self.gain
        rows = F.linear(read, table, self.bias)
        if self.mean is not None and self.spread is not None:
            rows = rows + (read @ self.spread)[..., None] * self.mean
        return rows


class GaugelassoForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model: embedding, operators around one residual stream, classifier."""

    config_class = GaugelassoConfig
    main_input_name = "input_ids"

    def __init__(self, config: GaugelassoConfig):
        super().__init__(config)
        self.embedding = Embedding(config)
        self.operators = nn.ModuleDict()
        layer = 0
        for op in config.operators:
            if op["kind"] == "attention":
                self.operators[op["name"]] = Attention(op, layer, config.rms_norm_eps)
                layer += 1
            else:
                mlp = GeluMlp if "gelu" in op else Mlp
                self.operators[op["name"]] = mlp(op, config.rms_norm_eps)
        self.classifier = (TiedClassifier if config.tied_columns else Classifier)(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass  # all weights come from the file

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, S, outputs], and with `labels` [B, S] the loss of the next tokens.

        `attention_mask` [B, T + S] is 0 for padding, on either side. Labels of -100 do not count.
        """
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and self.config.num_hidden_layers:
            past_key_values = DynamicCache(config=self.config)
        earlier = 0 if past_key_values is None else past_key_values.get_seq_length()
        length = input_ids.shape[1]
        end, most = earlier + length, self.config.max_position_embeddings
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), end)
        if end > most:
            raise ValueError(f"{end} positions are more than the model's {most}; shorten the text")
        mask = attention_mask.bool()
        place = mask.long().cumsum(1)  # of a token among those that are not padding
        if position_ids is None:
            position_ids = (place - 1).clamp(min=0)[:, -length:]
        ahead = torch.arange(end, device=mask.device) - earlier
        here = torch.arange(length, device=mask.device)[:, None]
        # A padded token sees itself, because a softmax of nothing is NaN.
        own = ahead == here
        visible = (((ahead <= here) & mask[:, None]) | own)[:, None]
        x = self.embedding(input_ids, position_ids)
        for operator in self.operators.values():
            if isinstance(operator, Attention):
                seen = visible
                if operator.window is not None:
                    near = place[:, -length:, None] < place[:, None] + operator.window
                    seen = visible & (near | own)[:, None]
                x = operator(x, position_ids, seen, past_key_values)
            else:
                x = operator(x)
        shared = (self.embedding.table,) if self.config.tied_columns else ()
        logits = self.classifier(x[:, -logits_to_keep:] if logits_to_keep else x, *shared)
        loss: Any = None
        if labels is not None:
            predicted = logits[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(predicted, labels[:, 1:].flatten())
        if not (self.config.return_dict if return_dict is None else return_dict):
            return tuple(part for part in (loss, logits, past_key_values) if part is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
