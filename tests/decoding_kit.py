"""Tiny targets in float64 and a drafter whose acceptance is scripted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blockpilot.decoding.loading import byte_tokenizer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Block, Draft, Trace, Verdict, View
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.fixed import FixedPolicy

VOCAB = 61
KINDS = ("llama", "qwen3", "mistral")  # mistral with a sliding window
PROMPT = [5, 17, 3, 42, 8]


@cache
def tiny_target(
    kind: str = "llama",
    *,
    tied: bool = False,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    padded_rows: int = 0,
) -> Target:
    """Random 4-layer target of width 32; weights large enough for a varied greedy text.

    Treat it as read-only: tests share it.
    """
    window = {"sliding_window": 6} if kind == "mistral" else {}
    config = AutoConfig.for_model(
        kind,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB + padded_rows,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        **window,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 0.25)
    target = Target(model, byte_tokenizer())
    target.stop_ids = frozenset()  # each test declares its own
    return target


def with_stops(target: Target, *stop_ids: int) -> Target:
    """The same target with other stop ids."""
    other = Target(target.model, target.tokenizer)
    other.stop_ids = frozenset(stop_ids)
    return other


def bound_dflash() -> DFlashDrafter:
    """A random drafter of the tiny target."""
    drafter = DFlashDrafter(checkpoint="random", ignore_keys=[], head=None)
    drafter.bind(tiny_target())
    return drafter


class ScriptedDrafter:
    """Proposes a known continuation with errors where a script wants them.

    `wrong(cycle)` gives the slots (0-based among the proposals) to spoil in that cycle.
    """

    name = "scripted"
    fingerprint = "scripted"
    shape = None
    has_marginals = False
    trained_block_size: int | None = 8
    feature_layers: tuple[int, ...] = (1,)

    def __init__(self, gold: Sequence[int], wrong: Callable[[int], Sequence[int]]) -> None:
        self.gold, self.wrong, self.calls = list(gold), wrong, 0

    def bind(self, target: TargetModel) -> None:
        self.rows = target.embed_rows

    def start(self, view: View, capacity: int) -> None:
        self.calls = 0
        assert view.new_features is not None
        self.seen = view.new_features.shape[0]

    def draft(self, view: View, n_slots: int) -> Draft:
        assert view.new_features is not None
        if self.calls:
            self.seen += view.new_features.shape[0]
        assert self.seen == view.position, "features of exactly the positions before the anchor"
        first = view.position - view.prompt_ids.shape[0] + 1
        tokens = (self.gold[first:] + [0] * n_slots)[: n_slots - 1]
        for slot in self.wrong(self.calls):
            if slot < len(tokens):
                tokens[slot] = (tokens[slot] + 1) % self.rows
        self.calls += 1
        return Draft(torch.tensor(tokens))

    def observe(self, verdict: Verdict) -> None:
        pass


class MinimalPolicy:
    """The members of `Policy` and no more: four slots in every cycle, and no replay."""

    name = "minimal"
    fingerprint = None
    speculates = True
    block_size = widest = 4
    block_mode = "draft"
    reads_clock = tree = False

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        pass

    def start(self, view: View) -> None:
        pass

    def block(self, view: View) -> Block:
        return Block(4, 4)

    def next(self, draft: Draft, view: View) -> Draft:
        return draft

    def observe(self, verdict: Verdict) -> None:
        pass


def perfect(cycle: int) -> Sequence[int]:
    """Script of a drafter that is always right."""
    return ()


def sampler(temperature: float = 0.0, seed: int = 0, **filters: float) -> KeyedSampler:
    return KeyedSampler(
        temperature=temperature,
        seed=seed,
        prompt_hashes=["prompt"],
        **filters,  # type: ignore[arg-type]
    )


def plain(
    target: Target, budget: int, choose: KeyedSampler | None = None, prompt: list[int] = PROMPT
) -> Trace:
    """Plain decoding."""
    policy = FixedPolicy(block_size=1, block_mode="draft")
    method = Method(NoDrafter(), policy)
    method.bind(target)
    return decode(target, method, prompt, choose or sampler(), budget)


def scripted(
    target: Target,
    gold: Sequence[int],
    block_size: int,
    budget: int,
    wrong: Callable[[int], Sequence[int]] = perfect,
    choose: KeyedSampler | None = None,
) -> Trace:
    """Decoding with a scripted drafter."""
    drafter = ScriptedDrafter(gold, wrong)
    method = Method(drafter, FixedPolicy(block_size=block_size, block_mode="draft"))
    method.bind(target)
    return decode(target, method, PROMPT, choose or sampler(), budget)
