"""The same pair under transformers' own generators, on the same prompts in the same process."""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench_cycle import Section, answer_length
from bench_floor import seconds
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, StaticCache

from blockpilot.app.target import attention_of
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.native.compiler import compiler
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.drafters.none import NoDrafter
from blockpilot.drafters.prompt_lookup import PromptLookupDrafter
from blockpilot.generate import Pair
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.stats.intervals import bootstrap

N_TOKENS, LOOKUP = 256, 7
COMPILED_FROM = 64  # tokens; compiling takes a minute or two
WARM_UP, CAPACITY = 4, 512  # positions of the compiled peer's cache: it reads them all


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


class Untouched:
    """The target loaded anew by transformers alone: no head, hook or attention of ours in it."""

    def __init__(self, pair: Pair) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # What lies in memory is what was loaded, whatever form the checkpoint had.
            pair.target.model.save_pretrained(folder)
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=pair.target.dtype, attn_implementation=attention_of(pair.cfg)
            ).to(pair.target.device)
        self.model.generation_config.eos_token_id = list(pair.target.stop_ids) or None
        self.device = pair.target.device
        self._step = torch.compile(self.model.forward, dynamic=False)
        self._static: StaticCache | None = None

    @torch.inference_mode()
    def generate(self, ids: list[int], n_tokens: int, **more: Any) -> list[int]:
        """Tokens of `generate`, greedily, with a dynamic cache."""
        start = torch.tensor([ids], device=self.device)
        output = self.model.generate(
            input_ids=start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=n_tokens,
            do_sample=False,
            **more,
        )
        tokens: list[int] = output[0, len(ids) :].tolist()
        return tokens

    @torch.inference_mode()
    def compiled(self, ids: list[int], n_tokens: int) -> list[int]:
        """Tokens of greedy decoding with a static cache under `torch.compile`'s defaults."""
        if self._static is None:
            self._static = StaticCache(self.model.config, max_cache_len=CAPACITY)
        self._static.reset()
        stops = self.model.generation_config.eos_token_id or []
        given = torch.tensor([ids], device=self.device)
        logits = self.model(given, cache=self._static, logits_to_keep=1).logits
        tokens = [int(logits[0, -1].argmax())]
        while len(tokens) < n_tokens and tokens[-1] not in stops:
            given = torch.tensor([tokens[-1:]], device=self.device)
            logits = self._step(given, cache=self._static, logits_to_keep=1).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens


Decoder = Callable[[list[int], int], list[int]]


def decoders(pair: Pair, targets: dict[str, Target]) -> dict[str, Decoder]:
    """What is compared: our engines, plain and with drafts, and what transformers offers."""
    untouched = Untouched(pair)

    def ours(target: Target, method: Method) -> Decoder:
        bound = method.bind(target)
        return lambda ids, n: decode(target, bound, ids, KeyedSampler(), n).tokens

    def fixed(size: int | None) -> FixedPolicy:
        return FixedPolicy(block_size=size, block_mode="draft")

    made: dict[str, Decoder] = {"generate": untouched.generate}
    can_compile = pair.target.device.type == "cuda" or compiler() is not None
    if can_compile and answer_length(pair, N_TOKENS) >= COMPILED_FROM:
        made["static, compiled"] = untouched.compiled
    lookup = {"prompt_lookup_num_tokens": LOOKUP}
    made["generate lookup"] = lambda ids, n: untouched.generate(ids, n, **lookup)
    drafter = pair.method.drafter
    dflash = isinstance(drafter, DFlashDrafter)
    if dflash:
        assert isinstance(drafter, DFlashDrafter)
        assistant = Assistant(copy.deepcopy(drafter.network))
        made["generate dflash"] = lambda ids, n: untouched.generate(
            ids, n, assistant_model=assistant, speculation_type="dflash"
        )
    for engine, target in targets.items():
        made[f"{engine}: plain"] = ours(target, Method(NoDrafter(), fixed(1)))
        copied = PromptLookupDrafter(max_ngram=2, block_size=LOOKUP + 1)
        made[f"{engine}: lookup"] = ours(target, Method(copied, fixed(None)))
        if dflash:
            made[f"{engine}: dflash"] = ours(target, Method(copy.copy(drafter), fixed(None)))
    return made


def timed(
    device: torch.device, run: Decoder, ids: list[int], n_tokens: int
) -> tuple[float, list[int]]:
    """Seconds and tokens of one answer."""
    tokens: list[int] = []
    spent = seconds(device, lambda: tokens.extend(run(ids, n_tokens)))
    return spent, tokens


PEERS = {
    "plain": ("generate", "static, compiled"),
    "dflash": ("generate dflash",),
    "lookup": ("generate lookup",),
}


def bench_peers(pair: Pair, targets: dict[str, Target], prompts: list[list[int]]) -> Section:
    """Milliseconds per token behind the first one, every second prompt in the opposite order; a run
    of one token is taken off each side. Ratios are medians over prompts with their 95% interval.
    """
    runs = decoders(pair, targets)
    n_tokens = answer_length(pair, N_TOKENS)
    per_token: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, list[list[int]]] = {name: [] for name in runs}
    for number, ids in enumerate([prompts[0][-8:], *prompts]):  # the first time warms up
        length = n_tokens if number else WARM_UP
        spent = dict.fromkeys(runs, 0.0)
        said: dict[str, list[int]] = {}
        for name, run in list(runs.items())[:: -1 if number % 2 else 1]:
            whole, said[name] = timed(pair.target.device, run, ids, length)
            spent[name] = whole - timed(pair.target.device, run, ids, 1)[0]
        for name in runs if number else ():
            if len(said[name]) > 1:
                per_token[name].append(1e3 * spent[name] / (len(said[name]) - 1))
                texts[name].append(said[name])
    table = Table("", "ms per token", "peer / ours (95%)", "peer", "same text")
    table.title = f"answers of {n_tokens} tokens less their first, {len(prompts)} prompts"
    figures: dict[str, Any] = {}
    for name, values in per_token.items():
        figures[name] = {"ms_per_token": statistics.median(values)}
        kind = name.partition(": ")[2]
        rows = [("", "", "")]
        for peer in (each for each in PEERS.get(kind, ()) if each in runs):
            ratios = np.array(per_token[peer]) / np.array(values)
            low, high = bootstrap(lambda r: np.median(r, axis=-1), ratios)
            same = [a == b for a, b in zip(texts[name], texts[peer], strict=True)]
            ratio = float(np.median(ratios))
            rows.append((f"{ratio:.2f} ({low:.2f}-{high:.2f})", peer, f"{np.mean(same):.0%}"))
            figures[name][peer] = {
                "peer_over_ours": ratio,
                "low": low,
                "high": high,
                "same_text": float(np.mean(same)),
            }
        for cells in rows[1:] or rows:
            table.add_row(name, f"{figures[name]['ms_per_token']:.1f}", *cells)
    table.caption = "peers run an untouched model, loaded by transformers alone; greedy, T = 0"
    return Section("peers", [table], figures)
