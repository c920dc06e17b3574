"""Training of path heads: the stage on a frozen drafter, its files, the walk against the loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hydra.utils import instantiate
from safetensors.torch import load_file
from stages_kit import (
    composed,
    distill_arguments,
    distill_prompts,
    performed,
    response_settings,
    sweep_arguments,
    texts_of,
    walked_and_decoded,
    write_prompts,
)

from blockpilot.app.target import load_target
from blockpilot.app.tracking import NullTracker
from blockpilot.base.errors import UserError
from blockpilot.decoding.target import Target
from blockpilot.distill import __main__ as distill
from blockpilot.distill.corpus import Corpus
from blockpilot.distill.responses import Request, shard_file, write_responses
from blockpilot.prompts.base import Prompt
from blockpilot.sweep import __main__ as sweep

HEART = ["training.sequences_per_step=4", "training.anchors_per_sequence=16"]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that half knows seven answers."""
    folder = tmp_path_factory.mktemp("drafter")
    steps = ["training.steps=20", "training.evaluate_every=20"]
    arguments = distill_arguments(folder, distill_prompts(folder), *HEART, *steps)
    return performed(distill.run, "distill", *arguments)


def arguments_of(folder: Path, drafter: Path | str, *more: str) -> list[str]:
    own = [*HEART, f"recipe.drafter={drafter}", *more]
    return distill_arguments(folder, distill_prompts(folder), *own, recipe="path_head")


@pytest.fixture(scope="module")
def trained(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A head over it that knows the rest, and its losses on the way."""
    folder = tmp_path_factory.mktemp("path-head")
    losses: list[float] = []

    def log(tracker: NullTracker, values: Mapping[str, float], *, step: int) -> None:
        losses.extend(value for key, value in values.items() if key == "train/loss")

    # Random weights spread their probability: soft labels end high.
    steps = ["recipe.soft_labels=0", "training.steps=60", "training.evaluate_every=60"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NullTracker, "log", log)
        return performed(distill.run, "distill", *arguments_of(folder, drafter, *steps)), losses


def test_training_lowers_the_loss(trained: tuple[Path, list[float]]) -> None:
    _, losses = trained
    assert len(losses) == 60
    assert sum(losses[-5:]) / 5 < losses[0] / 2


def test_the_head_has_the_published_form_and_holds_no_drafter(
    drafter: Path, trained: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, _ = trained
    config = json.loads((folder / "config.json").read_text())
    assert config["dflash_config"] == {"selector_rank": 48, "selector_top_k": 16}
    assert config["skips_first_slot"] is True
    weights = load_file(folder / "model.safetensors")
    part = "candidate_selector."
    tables = {part + "predecessor_codebook", part + "successor_codebook"}
    assert set(weights) == tables | {part + "hidden_projection.weight"}
    assert {weights[name].shape for name in tables} == {(300, 48)}
    card = (folder / "README.md").read_text()
    assert f"Path head (selector) of the DFlash drafter `{drafter}`" in card
    markov = performed(
        distill.run,
        "distill",
        *arguments_of(tmp_path, drafter, "recipe.kind=markov", "training.steps=1"),
    )
    names = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    assert set(load_file(markov / "model.safetensors")) == names


def test_a_sweep_loads_the_head_and_profits_from_it(
    drafter: Path, trained: tuple[Path, list[float]], tmp_path: Path
) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", texts_of("distill", 7))
    accepted = {}
    for name, head in (("with", trained[0]), ("without", "null")):
        records = performed(
            sweep.run,
            "sweep",
            *sweep_arguments(tmp_path, file, "dtype=float32", "decoding.temperature=0"),
            f"drafter.checkpoint={drafter}",
            f"drafter.head={head}",
            "decoding.max_new_tokens=12",
            f"run_id={name}",
        )
        assert (records.groupby("prompt_id")["output_sha256"].nunique() == 1).all()
        widest = records[records["block_size"] == 4]
        accepted[name] = sum(sum(row) - len(row) for row in widest["committed"])
    assert accepted["with"] > accepted["without"], "these answers were learnt by heart"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_walk_over_stored_answers_gives_the_loops_tau(
    drafter: Path, tmp_path: Path, temperature: float
) -> None:
    cfg = composed("distill", *arguments_of(tmp_path, drafter))
    loaded = load_target(cfg)
    target = Target(loaded.model.double(), loaded.tokenizer)
    settings = response_settings(temperature, 0, 12, (2,), 9)
    batch = [
        Request(Prompt(text, "s", (text,), "distill"), target.tokenizer(text)["input_ids"])
        for text in [*texts_of("distill", 7), "a longer one", "x"]
    ]
    write_responses(target, batch, tmp_path, 0, settings)
    corpus = Corpus([shard_file(tmp_path, 0)])
    recipe = instantiate(cfg.recipe)
    student = recipe.blueprint(target, "name", 4, cfg.training).student(corpus)
    student.save(tmp_path / "head")
    method = student.method(tmp_path / "head")
    method.bind(target)
    walked, decoded = walked_and_decoded(
        student.tau, corpus, method, target, batch, temperature, 12
    )
    assert walked == decoded
    assert len(set(decoded)) > 1, "else the law would hold for any walk"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("new_drafter.block_size=8", "new_drafter.block_size=8: random has blocks of 16"),
        ("training.init=somewhere", "training.init=somewhere: a path head is trained anew"),
        ("recipe.kind=gated", "recipe.kind=gated: must be selector, markov"),
        ("recipe.rank=0", "recipe.rank=0: must be a whole number >= 1"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, override: str, message: str) -> None:
    given = arguments_of(tmp_path, "random", "new_drafter.block_size=16", override)
    with pytest.raises(UserError, match=message):
        performed(distill.run, "distill", *given)
