"""How fast the core is: parts of a cycle against the floor, peers, replay against decoding.

    python scripts/bench.py                       # the local pair
    python scripts/bench.py engine=compiled       # eager against compiled, alone
    python scripts/bench.py +model=qwen3-4b dtype=bfloat16

Takes the options of `python -m blockpilot.generate`; decoding.max_new_tokens shortens the answers.
Prints one table per part and writes all figures, with code and machine, into
<paths.outputs>/bench/<run id>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from bench_cycle import bench_cycle
from bench_engines import bench_engines
from bench_peers import bench_peers
from bench_replay import bench_replay
from rich.console import Console

from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.launch import run_id
from blockpilot.base.provenance import facts
from blockpilot.decoding.loop import Method
from blockpilot.drafters.none import NoDrafter
from blockpilot.generate import open_pair
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.prompts.bundled import BundledSet
from blockpilot.prompts.render import render

N_PROMPTS, N_PEERS, N_REPLAYED = 8, 12, 16
FORMATS = dict.fromkeys(("maths", "chat", "code"), "{turn}")


def main(overrides: list[str]) -> None:
    """Measure, print, write."""
    pair = open_pair(*overrides)
    plain = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode="draft"))
    plain.bind(pair.target)
    methods = {"plain": plain, "drafter": pair.method}
    model = pair.cfg.model
    questions = BundledSet(name="bundled", held_out=False, formats=FORMATS).load()
    prompts = []
    for question in questions[:N_REPLAYED]:
        message = [{"role": "user", "content": question.turns[0]}]
        prompts.append(render(pair.target.tokenizer, message, model.thinking, model.template_date))
    console, figures = Console(), {}
    console.print(
        f"{pair.cfg.model.name}, {pair.target.dtype}, {pair.target.device}, "
        f"{torch.get_num_threads()} threads"
    )
    parts = [
        lambda: bench_cycle(pair, methods, prompts[:N_PROMPTS]),
        lambda: bench_peers(pair, methods, prompts[:N_PEERS]),
        lambda: bench_replay(pair, plain, prompts),
    ]
    if pair.cfg.engine == "compiled":
        parts = [lambda: bench_engines(pair, methods, prompts[:N_PROMPTS])]
    for part in parts:
        section = part()
        console.print(section.table)
        figures[section.name] = section.figures
    made_by = {**facts(pair.target.device), "dtype": str(pair.target.dtype)}
    text = json.dumps({"model": pair.cfg.model.name, "made_by": made_by, **figures}, indent=1)
    folder = Path(pair.cfg.paths.outputs) / "bench"
    make_folder(folder)
    file = folder / f"{run_id()}.json"
    replace_file(file, lambda stream: stream.write(text.encode()))
    console.print(f"figures in {file}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"bench: error: {error}")
