"""A replayed sweep against a decoded one: what it costs and whether it visits the same cycles."""

from __future__ import annotations

import resource
import statistics
from collections import defaultdict
from typing import Any

import torch
from bench_cycle import Section, answer_length, seconds
from rich.table import Table

from blockpilot.decoding.anchors import TOP
from blockpilot.decoding.answers import Answer, answer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.replay import anchors_per_chunk, free_memory, replay
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.types import Block, Trace
from blockpilot.generate import Pair
from blockpilot.policies.fixed import FixedPolicy

N_TOKENS, RADIUS = 128, 2


def bench_replay(pair: Pair, plain: Method, prompts: list[list[int]]) -> Section:
    """All sizes of B-2..B+2 and plain decoding, by replay and by decoding, prompt by prompt."""
    target, drafter = pair.target, pair.method.drafter
    device, trained = target.device, drafter.trained_block_size
    assert trained is not None
    methods: dict[Block, Method] = {Block(1, 1): plain}
    for size in range(trained - RADIUS, trained + RADIUS + 1):
        policy = FixedPolicy(block_size=size, block_mode="draft")
        methods[Block(size, size)] = Method(drafter, policy)
        methods[Block(size, size)].bind(target)
    sampler = KeyedSampler(prompt_hashes=[""] * len(prompts))
    said: list[Answer] = []
    n_tokens = answer_length(pair, N_TOKENS)

    def all_answers() -> None:
        said[:] = answer(target, prompts, sampler, n_tokens, drafter.feature_layers)

    answering = seconds(device, all_answers)
    spent: defaultdict[str, list[float]] = defaultdict(list)
    equal, gaps = [], [0.0]
    for ids, one in zip(prompts, said, strict=True):
        text = torch.tensor([*ids, *one.tokens], device=device)
        for name, candidates in (("replay", 0), ("replay with marginals", TOP)):
            job = _replayer(pair, text, len(ids), one, methods, candidates)
            spent[name].append(seconds(device, job))
        for plan, method in methods.items():
            traces: list[Trace] = []
            job = _decoder(pair, method, ids, traces)
            spent[f"decode {plan.verified}"].append(seconds(device, job))
            same, gap = _compare(pair, plan, ids, traces[0])
            equal.append(same)
            gaps.append(gap)
    per_prompt = {name: sum(values) / len(values) for name, values in spent.items()}
    decoded = sum(value for name, value in per_prompt.items() if name.startswith("decode"))
    replayed = answering / len(prompts) + per_prompt["replay with marginals"]
    figures: dict[str, Any] = {
        "answer_s_per_prompt": answering / len(prompts),
        **{f"{name}_s_per_prompt": value for name, value in per_prompt.items()},
        "replay_over_plain_decode": _ratio(spent["replay"], spent["decode 1"]),
        "replay_with_marginals_over_plain_decode": _ratio(
            spent["replay with marginals"], spent["decode 1"]
        ),
        "decoded_sweep_over_replayed": decoded / replayed,
        "equal_rows": sum(equal) / len(equal),
        "largest_tau_difference": max(gaps),
        "peak_memory_gib": _peak_gib(device),
    }
    title = f"replay of {2 * RADIUS + 1} sizes, {len(prompts)} prompts of {n_tokens} tokens"
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:.3f}")
    table.caption = "equal rows: given the text that each method itself decoded"
    return Section("replay", table, figures)


def _replayer(
    pair: Pair, text: torch.Tensor, start: int, one: Answer, plans: Any, candidates: int
) -> Any:
    drafter, memory = pair.method.drafter, free_memory(pair.target.device) // 8
    chunk = anchors_per_chunk(drafter, pair.target, len(text), memory)
    features = None if one.features is None else one.features.to(text.device)
    return lambda: replay(drafter, text, start, features, plans, chunk=chunk, candidates=candidates)


def _decoder(pair: Pair, method: Method, ids: list[int], traces: list[Trace]) -> Any:
    n_tokens = answer_length(pair, N_TOKENS)
    return lambda: traces.append(decode(pair.target, method, ids, KeyedSampler(), n_tokens))


def _compare(pair: Pair, plan: Block, ids: list[int], trace: Trace) -> tuple[bool, float]:
    """Whether a replay of the text that a method decoded has its cycles; the difference in tau."""
    target, drafter = pair.target, pair.method.drafter
    text = torch.tensor([*ids, *trace.tokens], device=target.device)
    target.capture(drafter.feature_layers)
    with torch.inference_mode():
        features = target.forward(text[:-1], target.new_cache(len(text)), n_logits=1).features
    found = replay(drafter, text, len(ids), features, [plan], chunk=len(text))
    other = found.trace(plan, trace.tokens, trace.stop_reason)
    if not trace.committed:
        return True, 0.0
    taus = [sum(each.committed) / len(each.committed) for each in (trace, other)]
    return other.committed == trace.committed, abs(taus[0] - taus[1])


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _peak_gib(device: torch.device) -> float:
    """Most memory that this process held, of the GPU where there is one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
