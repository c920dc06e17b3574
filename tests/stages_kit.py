"""Tiny stages for tests: configurations of a 4-layer random target, run in this process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hydra
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from blockpilot.app import config
from blockpilot.app.config import typed
from blockpilot.app.help import stages
from blockpilot.app.job import perform
from blockpilot.base.paths import conf_dir
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.protocols import TargetModel
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.responses import Request, ResponseSettings
from blockpilot.prompts.base import UNASSIGNED, Prompt
from blockpilot.prompts.splits import split_of_hash

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 128
# Weights large enough for a varied text; one target layer is all that a drafter of 4 layers reads.
TINY = [
    "weights=random",
    "device=cpu",
    "threads=1",
    "model.architecture.num_hidden_layers=4",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=48",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "model.architecture.head_dim=8",
    "model.architecture.vocab_size=300",
    f"model.architecture.max_position_embeddings={CONTEXT}",
    "model.architecture.tie_word_embeddings=false",
    "+model.architecture.initializer_range=0.25",
]
SCHEMAS = {name: getattr(config, f"{name.capitalize()}Config") for name in stages()}
Result = TypeVar("Result")


def composed(stage: str, *overrides: str) -> Any:
    """The checked configuration that `python -m blockpilot.<stage> <overrides>` would get."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return typed(hydra.compose(stage, list(overrides)), SCHEMAS[stage])


def performed(run: Callable[[Any], Result], stage: str, *overrides: str) -> Result:
    """Run a stage's work as its `main` would: seeded, with the threads that it asks for."""
    cfg = composed(stage, *overrides)
    threads = torch.get_num_threads()
    try:
        return perform(run, cfg)
    finally:
        torch.set_num_threads(threads)


def sweep_arguments(outputs: Path, prompts: Path, *more: str) -> list[str]:
    """Overrides of a tiny decoded float64 sweep of a file of prompts; random drafter, size 16."""
    return [
        *TINY,
        "dtype=float64",
        "drafter.checkpoint=random",
        "tracker=none",
        "run_id=run",
        "mode=decode",
        "radius=1",
        "decoding.max_new_tokens=6",
        "decoding.temperature=1",
        "prompts=local",
        f"prompts.path={prompts}",
        f"paths.outputs={outputs}",
        *more,
    ]


def write_prompts(file: Path, prompts: Sequence[str | Sequence[str]]) -> Path:
    """A JSONL file of prompts; a list of texts is a conversation of several turns."""
    turns = [[each] if isinstance(each, str) else list(each) for each in prompts]
    rows = [{"id": f"p{number:02d}", "turns": each} for number, each in enumerate(turns)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def texts_of(split: str, n: int) -> list[str]:
    """Short prompts that the hash puts into a split."""

    def candidates() -> Iterator[str]:
        number = 0
        while True:
            yield f"say {number}"
            number += 1

    found: list[str] = []
    for text in candidates():
        prompt = Prompt(id="x", set="x", turns=(text,), split=UNASSIGNED)
        if split_of_hash(prompt.hash) == split:
            found.append(text)
            if len(found) == n:
                return found
    raise AssertionError


def command(stage: str, *arguments: str, processes: int = 1) -> list[str]:
    """The command line of a stage, under torchrun where several processes are wanted."""
    launcher = ["-m", f"blockpilot.{stage}"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", *launcher]
    return [sys.executable, *launcher, *arguments]


def environment() -> dict[str, str]:
    """Of a command started from anywhere: this checkout, one thread."""
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**os.environ, **one, "PYTHONPATH": str(ROOT)}


def executed(arguments: Sequence[str], cwd: Path, text: str = "") -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a real process."""
    done = subprocess.run(
        arguments,
        cwd=cwd,
        env=environment(),
        input=text.encode(),
        capture_output=True,
        timeout=240,
        check=False,
    )
    # Not text=True, which turns the carriage returns of random text into line breaks.
    return done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")


def entered(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *arguments: str) -> int:
    """Exit status of a stage's `main` in this process, with these command-line arguments."""
    monkeypatch.setattr(sys, "argv", ["stage", *arguments])
    handlers = logging.getLogger().handlers[:]
    GlobalHydra.instance().clear()
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        logging.getLogger().handlers[:] = handlers
    return int(left.value.code or 0)


TINY_RECIPES = {
    "dflash": ["recipe.n_layers=1", "recipe.n_target_layers=1"],
    "path_head": ["recipe.drafter=random"],
}


def distill_arguments(
    outputs: Path, prompts: Path, *more: str, recipe: str = "dflash"
) -> list[str]:
    """Overrides of a tiny float32 distillation: one layer, block size 4, learnt by heart."""
    return [
        f"recipe={recipe}",
        *TINY_RECIPES.get(recipe, []),
        *TINY,
        "dtype=float32",
        "tracker=none",
        "run_id=run",
        "decoding.max_new_tokens=12",
        "responses.batch_size=3",
        "responses.validation=2",
        "new_drafter.name=drafter",
        "new_drafter.block_size=4",
        "training.steps=6",
        "training.sequences_per_step=2",
        "training.anchors_per_sequence=8",
        "training.learning_rate=3e-2",
        "training.log_every=1",
        "training.evaluate_every=2",
        "prompts=local",
        f"prompts.path={prompts}",
        f"paths.outputs={outputs}",
        *more,
    ]


def distill_prompts(folder: Path, n_distill: int = 7, n_validation: int = 3) -> Path:
    """A file of prompts that fall into the two splits which the stage reads."""
    texts = [*texts_of("distill", n_distill), *texts_of("validation", n_validation)]
    return write_prompts(folder / "prompts.jsonl", texts)


def response_settings(
    temperature: float, seed: int, budget: int, layers: tuple[int, ...], batch_size: int
) -> ResponseSettings:
    """Settings of stored responses of a tiny target in float64."""
    return ResponseSettings(
        target="t",
        target_fingerprint="abc",
        tokenizer="def",
        revision=None,
        dtype="float64",
        thinking=None,
        template_date="2025-01-01",
        temperature=temperature,
        seed=seed,
        max_new_tokens=budget,
        feature_layers=layers,
        batch_size=batch_size,
    )


def walked_and_decoded(
    tau: Callable[[Example], float],
    corpus: Corpus,
    method: Method,
    target: TargetModel,
    batch: Sequence[Request],
    temperature: float,
    budget: int,
) -> tuple[list[float], list[float]]:
    """Tau of a batch's answers: as `tau` walks the stored ones, and as `method` decodes them."""
    walked, decoded = [], []
    for index, request in enumerate(batch):
        walked.append(tau(corpus[index]))
        sampler = KeyedSampler(temperature=temperature, seed=0, prompt_hashes=[request.prompt.hash])
        trace = decode(target, method, request.ids, sampler, budget)
        decoded.append(sum(trace.committed) / len(trace.committed))
    return walked, decoded
