"""The target: any Hugging Face causal LM that the decode loop can run, one sequence at a time."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockpilot.base.errors import UserError
from blockpilot.base.provenance import digest
from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.features import FeatureTap, untap
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.types import Branches, Forward

log = logging.getLogger(__name__)

_FEW = 64


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits softly held under a cap, any shape."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True)
class LogitShape:
    """What a model does to its LM head's output: times `scale`, then softly held under `cap`."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitShape:
        """By the names that configurations of transformers give the two."""
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
        return cls(scale / divisor, getattr(config, "final_logit_softcapping", None))  # Gemma

    def __call__(self, raw: Tensor) -> Tensor:
        """Logits of the head's output, any shape."""
        if self.scale != 1:
            raw = raw * self.scale
        return capped(raw, self.cap)


class Target:
    """A causal LM with its tokenizer, its stop ids and the features that a drafter asked for."""

    engine = "eager"
    timed = True

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "unnamed"
    ) -> None:
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.device, self.dtype = model.device, model.dtype
        self.layers = _layers(model)
        self.max_positions: int = getattr(self.config, "max_position_embeddings", 1 << 30)
        self.hard_end = _hard_end(model)
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(self._head, nn.Linear):
            raise UserError("its LM head is no linear layer")
        self.logit_shape = LogitShape.of(self.config)
        self.embed_rows: int = self._embedding.weight.shape[0]
        scale = getattr(self._embedding, "embed_scale", 1.0)  # of the families of Gemma
        self.embedding_scale = float(scale)
        # An id past the embedding can be declared but never said.
        self.stop_ids = frozenset(i for i in _stop_ids(model, tokenizer) if i < self.embed_rows)
        self.compile_s = 0.0  # spent so far in first calls of a shape, by an engine that compiles
        self._tap: FeatureTap | None = None
        self._read = _HeadInput()
        self._head.register_forward_pre_hook(self._read)
        if self.device.type == "cpu" and self.dtype == torch.float32:
            self._head.forward = partial(_few_rows, self._head)  # type: ignore[method-assign]

    @property
    def head_input(self) -> Tensor:
        """What the LM head read in the last forward, [R, n, D]."""
        return self._read.hidden

    def capture(self, layer_ids: Sequence[int]) -> None:
        """From now on `forward` returns the concatenated outputs of these layers."""
        untap(self.layers)
        self._tap = FeatureTap(self.layers, layer_ids) if layer_ids else None

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] of ids [...]."""
        return self._embedding(ids)

    def logits(self, hidden: Tensor, shape: LogitShape | None = None) -> Tensor:
        """Logits [..., V] of LM-head inputs [..., D]: those that the model itself would give, or
        with another shape."""
        return (shape or self.logit_shape)(self._head(hidden))

    def choose(self, sampler: KeyedSampler, logits: Tensor, positions: Tensor) -> Tensor:
        """Tokens [n] that the sampler chooses for logits [n, V]; -1 where they are not finite."""
        return sampler(logits, positions)

    @property
    def head_rows(self) -> Tensor:
        """Rows [V, D] of the LM head with the scale of the logits in them, for training.

        Raises UserError for a head with a bias, which the losses do not know.
        """
        if self._head.bias is not None:
            raise UserError(f"model {self.name}: its LM head has a bias; training knows none")
        rows, scale = self._head.weight, self.logit_shape.scale
        return rows if scale == 1 else rows * scale  # the largest matrix: no copy for nothing

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the weights, as they were loaded."""
        begin = time.monotonic()
        found = digest(self.model)
        log.info("fingerprint of the target: %s, %.2f s", found, time.monotonic() - begin)
        return found

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Changes with the tokenizer and its chat template."""
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        state = json.loads(core.to_str()) if core is not None else self.tokenizer.get_vocab()
        for of_last_call in ("truncation", "padding"):
            state.pop(of_last_call, None)
        whole = [state, self.tokenizer.special_tokens_map, self.tokenizer.chat_template]
        text = json.dumps(whole, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]

    def new_cache(self, capacity: int) -> SlabCache:
        """Empty cache for one sequence of at most `capacity` positions."""
        return SlabCache(len(self.layers), capacity)

    def forward(
        self,
        ids: Tensor,  # [n]
        cache: SlabCache,
        n_logits: int,
        branches: Branches | None = None,
    ) -> Forward:
        """Append ids to the cache; logits of the last `n_logits` positions.

        With `branches` the ids are a tree behind the cache, else a chain.
        """
        more = {}
        if branches is not None:
            start, end = cache.length, cache.length + ids.shape[0]
            more = self.tree_arguments(branches.depths, branches.visible, start, end)
        output = self.model(input_ids=ids[None], cache=cache, logits_to_keep=n_logits, **more)
        features = None if self._tap is None else self._tap.take()[0]
        return Forward(output.logits[0], features, self.head_input[0])

    def tree_arguments(
        self,
        depths: Tensor,  # [n]
        visible: Tensor,  # [n, n] bool
        length: int | Tensor,
        width: int,
    ) -> dict[str, Any]:
        """Position ids and masks of a tree behind `length` cached positions.

        `width` is how many positions of the cache attention reads: the new ones end it, unless the
        cache has a fixed size. Layers with a sliding window get a mask of their own.
        """
        n, positions = depths.shape[0], depths + length
        places = torch.arange(width, device=depths.device)
        # Not written into an expanded mask: inductor gets that wrong (torch 2.13).
        behind = places - length
        node = behind.clamp(0, n - 1)
        held, new = behind < 0, (behind >= 0) & (behind < n)
        seen = held | (new & visible[:, node])
        masks = {"full_attention": seen}
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if window is not None and (not kinds or "sliding_attention" in kinds):
            at = torch.where(new, positions[node], places)
            masks["sliding_attention"] = seen & (positions[:, None] - at < window)
        kinds = kinds or {list(masks)[-1]}
        floats = {kind: self._additive(masks[kind]) for kind in kinds}
        # One mask for all layers is understood by every model; a mapping by those that mix kinds.
        mask: Any = floats if len(floats) > 1 else next(iter(floats.values()))
        return {"position_ids": positions[None], "attention_mask": mask}

    def _additive(self, seen: Tensor) -> Tensor:
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return mask.masked_fill_(~seen, lowest)[None, None]


class _HeadInput:
    """Keeps what an LM head reads. Not the target: whoever copies a model would copy it too."""

    hidden: Tensor

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # The last positions of a batch are a strided view, for which a CPU multiplies every row
        # with its own copy of the matrix: seconds instead of milliseconds.
        self.hidden = args[0].contiguous()
        return (self.hidden, *args[1:])


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers (UserError where they are not found or not all there are)."""
    layers = getattr(model.get_decoder(), "layers", None)
    n = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != n:
        raise UserError("its decoder layers do not lie in `layers`, as those of Llama do")
    return layers


def _hard_end(model: PreTrainedModel) -> int | None:
    """Length that no forward may pass, blocks that reach past the budget included; None: any may.

    Past it learned position embeddings end, or rotary angles change, also those of the keys that a
    cache holds.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for each in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if each.get("rope_type") == "dynamic":
            limits.append(config.max_position_embeddings)
        elif each.get("rope_type") == "longrope":
            limits.append(each["original_max_position_embeddings"])
    for name, module in model.get_decoder().named_children():
        if isinstance(module, nn.Embedding) and "pos" in name:
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def _few_rows(head: nn.Linear, hidden: Tensor) -> Tensor:
    """The same logits by the transposed product: for few rows and a vocabulary of columns the CPU's
    library is up to three times faster that way around (2 to 64 rows, AVX2, float32).
    """
    rows = hidden.flatten(0, -2)
    if head.bias is not None or not 1 < rows.shape[0] <= _FEW:
        return F.linear(hidden, head.weight, head.bias)
    return (head.weight @ rows.T).T.unflatten(0, hidden.shape[:-1])


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that the generation config declares, else the tokenizer's end of sequence, else none."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = tokenizer.eos_token_id
    if declared is None:
        return []
    return declared if isinstance(declared, list) else [declared]
