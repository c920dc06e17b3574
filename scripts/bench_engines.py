"""The compiled engine against the eager one, and the tokens after which compiling has paid."""

from __future__ import annotations

import statistics
from typing import Any

from bench_cycle import Section, answer_length
from rich.table import Table

from blockpilot.decoding.compiled import CompiledTarget
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.generate import Pair

N_TOKENS = 48


def bench_engines(pair: Pair, methods: dict[str, Method], prompts: list[list[int]]) -> Section:
    """Milliseconds per cycle of both engines, interleaved; the first prompt pays for compiling."""
    compiled = pair.target
    assert isinstance(compiled, CompiledTarget)
    eager = Target(compiled.model, compiled.tokenizer, compiled.name)
    targets = {"eager": eager, "compiled": compiled}
    spent: dict[tuple[str, str], list[float]] = {(m, e): [] for m in methods for e in targets}
    compile_s: dict[str, float] = {}
    same, n_tokens = [], answer_length(pair, N_TOKENS)
    for name, method in methods.items():
        before = compiled.compile_s
        for number, ids in enumerate([prompts[0], *prompts]):
            texts = []
            for engine in list(targets)[:: 1 if number % 2 else -1]:
                trace = decode(targets[engine], method, ids, KeyedSampler(), n_tokens)
                texts.append(trace.tokens)
                if number and trace.committed:
                    spent[name, engine].append(1e3 * trace.decode_s / len(trace.committed))
            same.append(texts[0] == texts[1])
        compile_s[name] = compiled.compile_s - before
    table = Table("", "eager", "compiled", "eager / compiled", "compile s", "pays after cycles")
    table.title = f"ms per cycle, medians of {len(prompts)} prompts"
    figures: dict[str, Any] = {"same_text": sum(same) / len(same)}
    for name in methods:
        slow, fast = (statistics.median(spent[name, engine]) for engine in targets)
        gain = statistics.median(
            a / b for a, b in zip(spent[name, "eager"], spent[name, "compiled"], strict=True)
        )
        pays = f"{1e3 * compile_s[name] / (slow - fast):,.0f}" if slow > fast else "never"
        cells = f"{slow:.1f}", f"{fast:.1f}", f"{gain:.2f}", f"{compile_s[name]:.0f}", pays
        table.add_row(name, *cells)
        figures[name] = {
            "eager_ms": slow,
            "compiled_ms": fast,
            "ratio": gain,
            "compile_s": compile_s[name],
        }
    table.caption = f"same text: {figures['same_text']:.0%} of the answers"
    return Section("engines", table, figures)
