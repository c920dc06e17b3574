"""The same pair under transformers' own generators, on the same prompts in the same process."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench_cycle import Section, answer_length, seconds
from rich.table import Table
from torch import Tensor, nn

from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.drafters.prompt_lookup import PromptLookupDrafter
from blockpilot.generate import Pair
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.stats.intervals import bootstrap

N_TOKENS, LOOKUP, ROUNDS = 48, 7, 2


class Assistant(nn.Module):
    """A DFlash network behind the interface that transformers' DFlash generator calls."""

    def __init__(self, network: DFlashNetwork) -> None:
        super().__init__()
        self.network = network
        config = network.config
        self.config = copy.deepcopy(config.layers)
        self.config.target_layer_ids = list(config.target_layer_ids)
        self.config.block_size = config.block_size
        self.config.mask_token_id = config.mask_token_id
        self.generation_config = None

    @property
    def device(self) -> torch.device:
        return self.network.fc.weight.device

    def forward(
        self,
        noise_embeds: Tensor,  # [1, B, D]
        context_hidden_states: Tensor,  # [1, n, F]
        position_ids: Tensor,  # [1, n + B]
        attention_mask: Tensor | None,
        cache: Any,
    ) -> SimpleNamespace:
        """Final hidden states of the block; the context's keys stay in the cache."""
        context = self.network.context(context_hidden_states[0])
        n, x = context.shape[0], noise_embeds[0]
        cos, sin = self.network.rope(position_ids[0], x.dtype)
        for index, layer in enumerate(self.network.stack):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            old = attention.keys_values(context, cos[:n], sin[:n])
            new = attention.keys_values(normed, cos[n:], sin[n:])
            keys, values = (torch.cat(both, dim=-2)[None] for both in zip(old, new, strict=True))
            keys, values = cache.update(keys, values, index)
            queries = attention.queries(normed, cos[n:], sin[n:])[None]
            attended = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
            x = layer.finish(x, attended[0])
        return SimpleNamespace(last_hidden_state=self.network.norm(x)[None])


def bench_peers(pair: Pair, methods: dict[str, Method], prompts: list[list[int]]) -> Section:
    """Seconds of whole answers, prefill included, there and back; ratios of tokens per second.

    `generate` runs greedily with its default cache and stops where it likes, so what counts is the
    time per token.
    """
    runs: dict[str, Callable[[list[int]], list[int]]] = {
        "plain": lambda ids: ours(pair, methods["plain"], ids),
        "generate": lambda ids: theirs(pair, ids),
        "dflash": lambda ids: ours(pair, pair.method, ids),
    }
    policy = FixedPolicy(block_size=LOOKUP + 1, block_mode="draft")
    lookup = Method(PromptLookupDrafter(max_ngram=2, block_size=LOOKUP + 1), policy)
    lookup.bind(pair.target)
    runs["lookup"] = lambda ids: ours(pair, lookup, ids)
    runs["generate lookup"] = lambda ids: theirs(pair, ids, prompt_lookup_num_tokens=LOOKUP)
    drafter = pair.method.drafter
    if isinstance(drafter, DFlashDrafter):
        assert drafter.network is not None
        assistant = Assistant(drafter.network)
        runs["generate dflash"] = lambda ids: theirs(
            pair, ids, assistant_model=assistant, speculation_type="dflash"
        )
    per_token: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, list[list[int]]] = {name: [] for name in runs}
    for number, ids in enumerate([prompts[0], *prompts]):  # the first time warms up
        spent = dict.fromkeys(runs, 0.0)
        said: dict[str, list[int]] = {}
        for round_ in range(ROUNDS):  # there and back: whoever runs first finds cold caches
            for name in list(runs)[:: 1 if round_ % 2 else -1]:
                work = lambda name=name: said.update({name: runs[name](ids)})  # noqa: B023, E731
                spent[name] += seconds(pair.target.device, work)
        for name in runs if number else ():
            per_token[name].append(spent[name] / ROUNDS / len(said[name]))
            texts[name].append(said[name])
    n_tokens = answer_length(pair, N_TOKENS)
    title = f"whole answers of {n_tokens} tokens, prefill included, {len(prompts)} prompts"
    table = Table("", "ms per token", "peer / ours", "95%", title=title)
    figures: dict[str, Any] = {}
    for name, values in per_token.items():
        figures[name] = {"ms_per_token": 1e3 * statistics.median(values)}
        cells = ["", ""]
        peer = {"plain": "generate"}.get(name, f"generate {name}")
        if peer in per_token:
            mine, other = np.array(values), np.array(per_token[peer])
            ratio = float(np.median(other / mine))
            low, high = bootstrap(lambda r: np.median(r, axis=-1), other / mine)
            cells = [f"{ratio:.2f}", f"{low:.2f}-{high:.2f}"]
            same = [a == b for a, b in zip(texts[name], texts[peer], strict=True)]
            figures[name] |= {"peer_over_ours": ratio, "low": low, "high": high}
            figures[name]["same_text"] = sum(same) / len(same)
        table.add_row(name, f"{figures[name]['ms_per_token']:.1f}", *cells)
    table.caption = "peer / ours: median over prompts of their time per token over ours"
    return Section("peers", table, figures)


def ours(pair: Pair, method: Method, ids: list[int]) -> list[int]:
    """Tokens that our loop decoded."""
    return decode(pair.target, method, ids, KeyedSampler(), answer_length(pair, N_TOKENS)).tokens


@torch.inference_mode()
def theirs(pair: Pair, ids: list[int], **more: Any) -> list[int]:
    """Tokens that `generate` decoded."""
    pair.target.capture(())
    start = torch.tensor([ids], device=pair.target.device)
    output = pair.target.model.generate(
        input_ids=start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=answer_length(pair, N_TOKENS),
        do_sample=False,
        **more,
    )
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens
