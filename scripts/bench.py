"""How fast the core is: cycles against their floor, peers, replay against decoding.

    python scripts/bench.py                       # the local pair
    python scripts/bench.py +model=qwen3-4b dtype=bfloat16

Takes the options of `python -m blockpilot.generate`; decoding.max_new_tokens shortens the answers.
The engine asked for is measured beside the eager one, interleaved. Prints one table per part and
writes them and all figures, with code and machine, into <paths.outputs>/bench/<time>.txt and .json.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from bench_cycle import Section, bench_cycle
from bench_floor import Machine
from bench_peers import bench_peers
from bench_replay import bench_replay
from rich.console import Console

from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.launch import run_id
from blockpilot.base.provenance import facts
from blockpilot.decoding.target import Target
from blockpilot.generate import open_pair
from blockpilot.prompts.bundled import BundledSet
from blockpilot.prompts.render import render

N_PROMPTS, N_PEERS, N_REPLAYED = 6, 6, 6
FORMATS = dict.fromkeys(("maths", "chat", "code"), "{turn}")


def main(overrides: list[str]) -> None:
    """Measure, print, write."""
    pair = open_pair("policy=fixed", *overrides)
    eager = Target(pair.target.model, pair.target.tokenizer, pair.target.name)
    eager.stop_ids = pair.target.stop_ids
    targets = {"eager": eager, pair.target.engine: pair.target}
    model = pair.cfg.model
    questions = BundledSet(name="bundled", held_out=False, formats=FORMATS).load()
    prompts = []
    for question in questions[: max(N_PROMPTS, N_PEERS, N_REPLAYED)]:
        message = [{"role": "user", "content": question.turns[0]}]
        prompts.append(render(pair.target.tokenizer, message, model.thinking, model.template_date))
    console, figures = Console(record=True, width=110), {}
    console.print(
        f"{pair.cfg.model.name}, {pair.target.dtype}, {pair.target.device}, "
        f"{torch.get_num_threads()} threads"
    )
    machine = Machine(pair.target.device, pair.target.dtype)
    machine.measure()

    def show(section: Section) -> Section:
        for table in section.tables:
            console.print(table)
        figures[section.name] = section.figures
        return section

    show(bench_cycle(pair, targets, prompts[:N_PROMPTS], machine))
    peers = show(bench_peers(pair, targets, prompts[:N_PEERS])).figures
    machine.measure()
    generate_ms = peers["generate"]["ms_per_token"]
    show(bench_replay(pair, pair.target, prompts[:N_REPLAYED], machine.limits, generate_ms))
    made_by = {**facts(pair.target.device), "dtype": str(pair.target.dtype)}
    text = json.dumps({"model": pair.cfg.model.name, "made_by": made_by, **figures}, indent=1)
    folder, name = Path(pair.cfg.paths.outputs) / "bench", run_id()
    make_folder(folder)
    contents = {".json": text.encode(), ".txt": console.export_text().encode()}
    for ending, content in contents.items():
        replace_file(folder / f"{name}{ending}", partial(_write, content))
    console.print(f"figures in {folder / name}.json")


def _write(content: bytes, stream: BinaryIO) -> None:
    stream.write(content)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"bench: error: {error}")
