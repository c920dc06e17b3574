"""Tau of a finished drafter on prompts that it did not learn from, measured by all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accelerate import PartialState
from accelerate.utils import gather_object

from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.distill.responses import Request


def held_out_taus(
    target: Target,
    method: Method,
    requests: Mapping[str, Sequence[Request]],
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int,
) -> dict[str, float]:
    """Macro tau per prompt set at the trained size, by the decode loop; the same on every rank.

    Every rank has to call it and decodes its share of the prompts.
    """
    method.bind(target)
    processes = PartialState()
    work = [(name, request) for name, group in requests.items() for request in group]
    mine = []
    for index in range(processes.process_index, len(work), processes.num_processes):
        name, request = work[index]
        sampler = KeyedSampler(
            temperature=temperature, seed=seed, prompt_hashes=[request.prompt.hash]
        )
        trace = decode(target, method, request.ids, sampler, max_new_tokens)
        if trace.committed:
            mine.append((index, name, sum(trace.committed) / len(trace.committed)))
    taus: dict[str, list[float]] = {}
    for _, name, tau in sorted(gather_object(mine)):
        taus.setdefault(name, []).append(tau)
    return {name: round(sum(each) / len(each), 3) for name, each in taus.items()}
