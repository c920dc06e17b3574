"""What a folder holds belongs to one target, one tokenizer, one set of prompts; others are refused.

Every change here keeps all names: only the weights, the words or the date differ.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import tiny_target
from safetensors.torch import load_file, save_file
from stages_kit import (
    TINY,
    composed,
    distill_arguments,
    distill_prompts,
    performed,
    sweep_arguments,
    write_prompts,
)

from blockpilot import cost
from blockpilot.app.target import load_target
from blockpilot.base.errors import UserError
from blockpilot.base.provenance import digest
from blockpilot.distill import __main__ as distill
from blockpilot.drafters.dflash_load import random_network, save_network
from blockpilot.records.store import read_records
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep import rows

PROMPTS = ["one", "two"]


@pytest.fixture
def other_weights(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make later loads give the same target with one number of its LM head changed."""

    def change() -> None:
        for stage in (sweep, cost, distill):
            load = stage.load_target

            def changed(cfg: Any, load: Any = load) -> Any:
                target = load(cfg)
                target.model.get_output_embeddings().weight.data[3, 5] += 1e-3
                return target

            monkeypatch.setattr(stage, "load_target", changed)

    return change


def replayed(folder: Path, *more: str) -> list[str]:
    file = folder / "prompts.jsonl"
    if not file.exists():
        write_prompts(file, PROMPTS)
    return sweep_arguments(folder, file, "mode=replay", "radius=0", *more)


def refused(run: Any, stage: str, *arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        performed(run, stage, *arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_fingerprint_changes_with_any_one_number() -> None:
    model = copy.deepcopy(tiny_target().model)
    before = digest(model)
    assert digest(copy.deepcopy(model)) == before
    for weight in model.parameters():
        place = tuple(size - 1 for size in weight.shape)
        kept = weight.data[place].item()
        weight.data[place] += 1e-9
        assert digest(model) != before
        weight.data[place] = kept
    assert digest(model) == before
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    first.up_proj, second.up_proj = second.up_proj, first.up_proj
    assert digest(model) != before, "tensors that change places are other weights"


def test_a_sweep_does_not_continue_on_other_weights(tmp_path: Path, other_weights: Any) -> None:
    before = performed(sweep.run, "sweep", *replayed(tmp_path))
    other_weights()
    told = refused(sweep.run, "sweep", *replayed(tmp_path))
    assert "made with target_fingerprint=" in told
    records = read_records(tmp_path / "sweep/run")
    assert set(records["target_fingerprint"]) == set(before["target_fingerprint"])
    assert len(records) == len(before)


def test_a_cost_curve_is_not_that_of_other_weights(tmp_path: Path, other_weights: Any) -> None:
    arguments = [*TINY, "dtype=float64", "drafter.checkpoint=random", "run_id=run", "repeats=1"]
    arguments += ["sizes=[1]", "trees=[]", "contexts=[8]", "decoding.max_new_tokens=3"]
    arguments += [f"paths.outputs={tmp_path}"]
    performed(cost.run, "cost", *arguments)
    other_weights()
    assert "made with target_fingerprint=" in refused(cost.run, "cost", *arguments)


def test_distill_does_not_learn_from_another_models_answers(
    tmp_path: Path, other_weights: Any
) -> None:
    arguments = distill_arguments(tmp_path, distill_prompts(tmp_path), "training.steps=1")
    performed(distill.run, "distill", *arguments)
    other_weights()
    told = refused(distill.run, "distill", *arguments)
    assert "responses in" in told
    assert "made with target_fingerprint=" in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("model.template_date=2025-02-03", "made with template_date=2025-01-01, this run has"),
        ("drafter.checkpoint={other}", "made with dflash16.drafter_checkpoint=random@"),
    ],
)
def test_a_sweep_does_not_continue_with_another_date_or_drafter(
    change: str, told: str, tmp_path: Path
) -> None:
    performed(sweep.run, "sweep", *replayed(tmp_path))
    if "{other}" in change:
        cfg = composed("sweep", *replayed(tmp_path))
        network = random_network(load_target(cfg))
        network.norm.weight.data[0] = 2
        save_network(network, tmp_path / "other")
        change = change.format(other=tmp_path / "other")
    assert told in refused(sweep.run, "sweep", *replayed(tmp_path, change))


def test_an_id_does_not_stand_for_two_conversations(tmp_path: Path) -> None:
    performed(sweep.run, "sweep", *replayed(tmp_path))
    write_prompts(tmp_path / "prompts.jsonl", ["one", "three"])
    told = refused(sweep.run, "sweep", *replayed(tmp_path))
    assert "local/p01" in told
    assert "other tokens of prompt" in told or "another conversation" in told


def test_a_prompt_of_other_tokens_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changed them: here a tokenizer that says the same of itself."""
    performed(sweep.run, "sweep", *replayed(tmp_path))
    render = rows.render
    monkeypatch.setattr(rows, "render", lambda *given: [*render(*given), 7])
    assert "other tokens of prompt local/p00" in refused(sweep.run, "sweep", *replayed(tmp_path))


# --- a target named by its folder alone --------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny target as `save_pretrained` leaves it."""
    target = tiny_target("qwen3")
    place = tmp_path / "mine"
    copy.deepcopy(target.model).float().save_pretrained(place)
    target.tokenizer.save_pretrained(place)
    return place


def test_a_folder_alone_is_loaded_named_and_decoded_without_a_drafter(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the default model's GGUF file under the folder's name."""
    file = write_prompts(folder.parent / "prompts.jsonl", PROMPTS)
    arguments = [f"model.repo={folder}", "device=cpu", "threads=1", "dtype=float32"]
    arguments += ["run_id=run", "tracker=none", "decoding.max_new_tokens=4", "prompts=local"]
    arguments += [f"prompts.path={file}", f"paths.outputs={folder.parent}"]
    with caplog.at_level(logging.WARNING):
        records = performed(sweep.run, "sweep", *arguments)
    assert "no drafter of mine is known: decoding without one" in caplog.text
    assert set(records["target"]) == {"mine"}
    assert set(records["method"]) == {"plain"}
    loaded = load_target(composed("sweep", *arguments))
    assert set(records["target_fingerprint"]) == {loaded.fingerprint}
    wanted = tiny_target("qwen3").model.get_output_embeddings().weight.float()
    torch.testing.assert_close(loaded.model.get_output_embeddings().weight, wanted)
    plan = performed(sweep.run, "sweep", *arguments, "plan=true")
    assert plan.empty


@pytest.mark.parametrize(
    ("sizes", "trees", "told"),
    [("[1,8]", "[]", "has no block size but 1"), ("[1]", "[8]", "has no slot marginals")],
)
def test_no_cost_of_a_block_is_measured_without_a_drafter(
    folder: Path, sizes: str, trees: str, told: str
) -> None:
    arguments = [f"model.repo={folder}", "device=cpu", "threads=1", "run_id=run", "tracker=none"]
    arguments += [f"sizes={sizes}", f"trees={trees}", f"paths.outputs={folder.parent}"]
    assert f"drafter none {told}" in refused(cost.run, "cost", *arguments)
    assert not list(folder.parent.rglob("cost.json"))


def test_a_folder_with_a_named_drafter_decodes_with_it(folder: Path) -> None:
    given = [f"model.repo={folder}", "run_id=x", "drafter.checkpoint=random"]
    cfg = composed("generate", *given)
    assert cfg.drafter._target_.endswith("DFlashDrafter")
    assert cfg.model.gguf is None
    assert cfg.model.name == "mine"


def test_a_known_models_own_repository_keeps_its_drafter() -> None:
    cfg = composed("generate", "run_id=x", "+model=qwen3-4b", "model.repo=Qwen/Qwen3-4B")
    assert cfg.drafter.checkpoint == "z-lab/Qwen3-4B-DFlash-b16"
    assert cfg.model.name == "qwen3-4b"


def test_weights_that_a_checkpoint_lacks_are_not_drawn_at_random(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.layers.2.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights .* model\.layers\.2\.mlp\.up_proj\.weight"):
        load_target(composed("generate", "run_id=x", "device=cpu", f"model.repo={folder}"))
