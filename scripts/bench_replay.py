"""A replayed sweep against a decoded one: what it costs and whether it visits the same cycles."""

from __future__ import annotations

import copy
import resource
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from bench_cycle import Section, answer_length
from bench_floor import Limits, drafter_work, seconds
from rich.table import Table

from blockpilot.decoding.anchors import TOP
from blockpilot.decoding.answers import Answer, answer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.replay import anchors_per_chunk, free_memory, replay
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import LogitShape, Target
from blockpilot.decoding.types import Block, Trace
from blockpilot.drafters.none import NoDrafter
from blockpilot.generate import Pair
from blockpilot.policies.fixed import FixedPolicy

N_TOKENS, RADIUS = 128, 2


def bench_replay(
    pair: Pair, target: Target, prompts: list[list[int]], limits: Limits, generate_ms: float
) -> Section:
    """All sizes of B-2..B+2 and plain decoding, by replay and by decoding, prompt by prompt.

    `generate_ms` is what a token of transformers' `generate` takes.
    """
    drafter = copy.copy(pair.method.drafter)
    device, trained = target.device, drafter.trained_block_size
    assert trained is not None
    plain = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode="draft")).bind(target)
    methods: dict[Block, Method] = {Block(1, 1): plain}
    for size in range(trained - RADIUS, trained + RADIUS + 1):
        policy = FixedPolicy(block_size=size, block_mode="draft")
        methods[Block(size, size)] = Method(drafter, policy).bind(target)
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
            job = _replayer(target, drafter, text, len(ids), one, methods, candidates)
            spent[name].append(seconds(device, job))
        asked = _head_rows(target, _replayer(target, drafter, text, len(ids), one, methods, 0))
        head = target.model.get_output_embeddings().weight
        operations = 2.0 * asked * head.numel()
        for block in methods:  # each through the drafter, behind every anchor
            network = drafter_work(target, drafter, block.drafted, len(text) // 2)[:1]
            operations += len(one.tokens) * sum(each.operations for each in network)
        spent["floor"].append(operations / limits.operations_s)
        spent["generate"].append(1e-3 * generate_ms * len(one.tokens))
        for block, method in methods.items():
            traces: list[Trace] = []
            job = _decoder(pair, target, method, ids, traces)
            spent[f"decode {block.verified}"].append(seconds(device, job))
            same, gap = _compare(target, drafter, block, ids, traces[0])
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
        "replay_over_generate": _ratio(spent["replay"], spent["generate"]),
        "replay_over_floor": _ratio(spent["replay"], spent["floor"]),
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
    return Section("replay", [table], figures)


def _replayer(
    target: Target,
    drafter: Any,
    text: torch.Tensor,
    start: int,
    one: Answer,
    blocks: Iterable[Block],
    candidates: int,
) -> Callable[[], object]:
    chunk = anchors_per_chunk(drafter, target, len(text), free_memory(target.device) // 8)
    features = None if one.features is None else one.features.to(text.device)
    return lambda: replay(
        drafter, text, start, features, blocks, chunk=chunk, candidates=candidates
    )


def _head_rows(target: Target, job: Callable[[], object]) -> int:
    """Rows that a replay sends through the LM head."""
    asked, head = [0], target.logits

    def counting(hidden: torch.Tensor, shape: LogitShape | None = None) -> torch.Tensor:
        asked[0] += hidden.shape[:-1].numel()
        return head(hidden, shape)

    target.logits = counting  # type: ignore[method-assign]
    try:
        job()
    finally:
        del target.logits
    return asked[0]


def _decoder(
    pair: Pair, target: Target, method: Method, ids: list[int], traces: list[Trace]
) -> Callable[[], object]:
    n_tokens = answer_length(pair, N_TOKENS)
    return lambda: traces.append(decode(target, method, ids, KeyedSampler(), n_tokens))


def _compare(
    target: Target, drafter: Any, block: Block, ids: list[int], trace: Trace
) -> tuple[bool, float]:
    """Whether a replay of the text that a method decoded has its cycles; the difference in tau."""
    text = torch.tensor([*ids, *trace.tokens], device=target.device)
    target.capture(drafter.feature_layers)
    with torch.inference_mode():
        features = target.forward(text[:-1], target.new_cache(len(text)), n_logits=1).features
    found = replay(drafter, text, len(ids), features, [block], chunk=len(text))
    other = found.trace(block, trace.tokens, trace.stop_reason)
    if not trace.committed:
        return True, 0.0
    taus = [sum(each.committed) / len(each.committed) for each in (trace, other)]
    return other.committed == trace.committed, abs(taus[0] - taus[1])


def _ratio(values: list[float], reference: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(values, reference, strict=True))


def _peak_gib(device: torch.device) -> float:
    """Most memory that this process held, of the GPU where there is one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
