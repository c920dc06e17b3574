"""What a decoding cycle spends its time on, for plain decoding and a drafter, in one process.

    python scripts/bench.py                     # the local pair
    python scripts/bench.py +model=qwen3-4b block_size=16 dtype=bfloat16

Takes the options of `python -m blockpilot.generate`. Methods are interleaved per prompt; shown are
medians over prompts with the middle half, so a disturbed prompt does not move them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.types import Trace
from blockpilot.drafters.none import NoDrafter
from blockpilot.errors import UserError
from blockpilot.generate import Pair, open_pair
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.prompts.bundled import BundledSet
from blockpilot.prompts.render import render
from blockpilot.verify.chain import verify_chain

N_PROMPTS, N_TOKENS = 8, 48
FORMATS = dict.fromkeys(("maths", "chat", "code"), "{turn}")
PARTS = ("target forward", "drafter forward", "LM heads", "sampling", "rest", "cycle")


class Stopwatch:
    """Seconds spent inside wrapped calls; waits for the device around them on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._device = device

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time added to `part`."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = call(*args, **kwargs)
            self.spent[part] += self._now() - begin
            return result

        return wrapper


@contextmanager
def watched(pair: Pair) -> Iterator[Stopwatch]:
    """Time the target's forwards, the LM head and the sampler while the block runs."""
    watch, target = Stopwatch(pair.target.device), pair.target
    head = target.model.get_output_embeddings()
    plain_head, plain_forward, plain_call = head.forward, target.forward, KeyedSampler.__call__
    in_target, in_draft = (watch.timed(part, plain_head) for part in ("target head", "draft head"))
    timed_forward, inside = watch.timed("forward", plain_forward), False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return timed_forward(*args, **kwargs)
        finally:
            inside = False

    head.forward = lambda *args: (in_target if inside else in_draft)(*args)
    target.forward = forward  # type: ignore[method-assign]
    KeyedSampler.__call__ = watch.timed("sampling", plain_call)  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        head.forward = plain_head
        del target.forward
        KeyedSampler.__call__ = plain_call  # type: ignore[method-assign]


def measure(pair: Pair, method: Method, ids: list[int]) -> tuple[Trace, dict[str, float]]:
    """One decode; milliseconds per cycle by part, the prefill left out."""
    cfg = pair.cfg.decoding
    sampler = KeyedSampler(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p)
    with watched(pair) as watch:
        at_prefill: dict[str, float] = {}

        def emit(tokens: list[int]) -> None:
            if not at_prefill:  # the first call comes at the end of the prefill
                at_prefill.update({"forward": 0.0, **watch.spent})

        trace = decode(pair.target, method, ids, sampler, N_TOKENS, emit=emit)
        spent = {k: v - at_prefill.get(k, 0.0) for k, v in watch.spent.items()}
    parts = {
        "target forward": spent["forward"] - spent["target head"],
        "drafter forward": trace.draft_s - spent.get("draft head", 0.0),
        "LM heads": spent["target head"] + spent.get("draft head", 0.0),
        "sampling": spent["sampling"],
        "cycle": trace.decode_s,
    }
    parts["rest"] = trace.decode_s - sum(parts[part] for part in PARTS[:4])
    return trace, {k: 1000 * v / len(trace.committed) for k, v in parts.items()}


def summary(values: list[float]) -> str:
    """Median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


def main(overrides: list[str]) -> None:
    """Measure and print."""
    pair = open_pair(*overrides)
    policy = FixedPolicy(block_size=1, block_mode="draft")
    methods = {"plain": Method(NoDrafter(), policy, verify_chain), "drafter": pair.method}
    methods["plain"].bind(pair.target)
    prompts = BundledSet(name="bundled", held_out=False, formats=FORMATS).load()[:N_PROMPTS]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    taus: dict[str, list[float]] = {name: [] for name in methods}
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first time warms up
        message = [{"role": "user", "content": prompt.turns[0]}]
        ids = render(pair.target.tokenizer, message, pair.cfg.model.thinking)
        order = list(methods)[:: 1 if number % 2 else -1]
        for name in order:
            trace, parts = measure(pair, methods[name], ids)
            if number and trace.committed:
                tau = sum(trace.committed) / len(trace.committed)
                rows[name].append({**parts, "ms per token": parts["cycle"] / tau})
                taus[name].append(tau)
    title = (
        f"ms per cycle, median (middle half) of {len(rows['plain'])} prompts; "
        f"{pair.cfg.model.name}, {pair.target.dtype}, {torch.get_num_threads()} threads"
    )
    table = Table("part", *methods, title=title)
    for part in (*PARTS, "ms per token"):
        table.add_row(part, *(summary([row[part] for row in rows[name]]) for name in methods))
    table.add_row("tau", *(summary(taus[name]) for name in methods))
    shares = [[row["rest"] / row["cycle"] for row in rows[name]] for name in methods]
    table.add_row("rest / cycle", *(f"{statistics.median(share):.1%}" for share in shares))
    ratios = [
        a["ms per token"] / b["ms per token"]
        for a, b in zip(rows["plain"], rows["drafter"], strict=True)
    ]
    table.add_row("speedup", "1", summary(ratios))
    Console().print(table)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"bench: error: {error}")
