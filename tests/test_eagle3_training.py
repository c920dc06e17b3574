"""Training of EAGLE-3 heads: the stage, the published form, the walk against the loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from decoding_kit import tiny_target
from safetensors.torch import load_file, save_file
from stages_kit import (
    distill_arguments,
    distill_prompts,
    performed,
    response_settings,
    sweep_arguments,
    texts_of,
    walked_and_decoded,
    write_prompts,
)

from blockpilot.app.tracking import NullTracker
from blockpilot.base.errors import UserError
from blockpilot.decoding.target import Target
from blockpilot.distill import __main__ as distill
from blockpilot.distill.corpus import Corpus
from blockpilot.distill.eagle3 import Eagle3Student
from blockpilot.distill.responses import Request, shard_file, write_responses
from blockpilot.drafters.eagle3 import new_head
from blockpilot.prompts.base import Prompt
from blockpilot.sweep import __main__ as sweep

HEART = [
    "training.steps=80",
    "training.sequences_per_step=4",
    "training.anchors_per_sequence=16",
    "training.evaluate_every=80",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A head that knows seven answers by heart, and its losses on the way."""
    folder = tmp_path_factory.mktemp("eagle3")
    losses: list[float] = []

    def log(tracker: NullTracker, values: Mapping[str, float], *, step: int) -> None:
        losses.extend(value for key, value in values.items() if key == "train/loss")

    arguments = distill_arguments(folder, distill_prompts(folder), *HEART, recipe="eagle3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NullTracker, "log", log)
        return performed(distill.run, "distill", *arguments), losses


def test_training_lowers_the_loss(trained: tuple[Path, list[float]]) -> None:
    _, losses = trained
    assert len(losses) == 80
    # Soft labels of random weights: their entropy remains.
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5


def test_the_head_has_the_published_form(trained: tuple[Path, list[float]]) -> None:
    folder, _ = trained
    assert folder.name == "drafter"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    weights = load_file(folder / "model.safetensors")
    layer = {f"self_attn.{part}_proj" for part in "qkvo"} | {"hidden_norm", "input_layernorm"}
    layer |= {"post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    wanted = {f"midlayer.{name}.weight" for name in layer}
    assert set(weights) == wanted | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert config["draft_vocab_size"] == len(weights["d2t"]) == int(weights["t2d"].sum())
    card = (folder / "README.md").read_text()
    assert "EAGLE-3 head" in card
    assert "draft_vocabulary: 12000" in card


def test_training_continues_from_a_head(trained: tuple[Path, list[float]], tmp_path: Path) -> None:
    given = distill_arguments(tmp_path, distill_prompts(tmp_path), *HEART, recipe="eagle3")
    given += [f"training.init={trained[0]}", "training.steps=0"]
    again = performed(distill.run, "distill", *given)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (trained[0] / name).read_bytes()
    config = json.loads((trained[0] / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 1, 0]
    config["eagle_aux_hidden_state_layer_ids"] = [3, 2, 1]
    shutil.copytree(trained[0], tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    other = [*given, f"training.init={tmp_path / 'other'}", "training.steps=1", "run_id=other"]
    made = performed(distill.run, "distill", *other)
    assert json.loads((made / "config.json").read_text()) == config
    answered = json.loads((made.parent / "responses/distill/local/settings.json").read_text())
    assert answered["feature_layers"] == [2, 1, 0], "it learns by what it reads"
    with pytest.raises(UserError, match=r"has \d+ tokens, recipe.draft_vocabulary=2 asks"):
        performed(distill.run, "distill", *given, "recipe.draft_vocabulary=2")
    shutil.copytree(trained[0], tmp_path / "own")
    weights = load_file(tmp_path / "own" / name)
    save_file({**weights, "embed_tokens.weight": torch.zeros(300, 32)}, tmp_path / "own" / name)
    with pytest.raises(UserError, match="the head has an embedding of its own"):
        performed(distill.run, "distill", *given, f"training.init={tmp_path / 'own'}")


def test_a_compiled_training_makes_the_same_head(
    trained: tuple[Path, list[float]], tmp_path: Path
) -> None:
    """By the backend that only traces: inductor fuses, so its bits may differ."""
    given = distill_arguments(tmp_path, distill_prompts(tmp_path), *HEART, recipe="eagle3")
    given += [f"training.init={trained[0]}", "training.steps=3"]
    name = "model.safetensors"
    eager = load_file(performed(distill.run, "distill", *given) / name)
    given += ["training.compile=eager", "run_id=compiled"]
    compiled = load_file(performed(distill.run, "distill", *given) / name)
    assert all(torch.equal(eager[key], compiled[key]) for key in eager)
    assert not torch.equal(eager["fc.weight"], load_file(trained[0] / name)["fc.weight"])


def test_a_sweep_profits_from_it(trained: tuple[Path, list[float]], tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", texts_of("distill", 7))
    records = performed(
        sweep.run,
        "sweep",
        *sweep_arguments(tmp_path, file, "dtype=float32", "decoding.temperature=0"),
        "drafter=eagle3",
        f"drafter.checkpoint={trained[0]}",
        "drafter.block_size=6",
        "decoding.max_new_tokens=12",
    )
    assert (records.groupby("prompt_id")["output_sha256"].nunique() == 1).all()
    widest = records[records["block_size"] == records["block_size"].max()]
    committed = [count for row in widest["committed"] for count in row]
    assert sum(committed) / len(committed) > 1.3, "these answers were learnt by heart"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_walk_over_stored_answers_gives_the_loops_tau(
    tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockpilot.distill.eagle3.has_16_bit_products", lambda device: False)
    shared = tiny_target()
    target = Target(shared.model, shared.tokenizer)
    target.stop_ids = frozenset()
    head = new_head(target, torch.arange(61)).double()
    with torch.no_grad():
        head.lm_head.weight.copy_(target.model.get_output_embeddings().weight)
        head.midlayer.mlp.down_proj.weight.mul_(0.1)
        head.midlayer.self_attn.o_proj.weight.mul_(0.1)
        head.fc.weight.copy_(torch.cat([torch.zeros(32, 64), torch.eye(32)], dim=1))
    settings = response_settings(temperature, 0, 20, (1, 1, 0), 9)
    batch = [
        Request(Prompt(text, "s", (text,), "distill"), [3 + i, 9, 20 + i])
        for i, text in enumerate(texts_of("distill", 6))
    ]
    write_responses(target, batch, tmp_path, 0, settings)
    corpus = Corpus([shard_file(tmp_path, 0)])
    student = Eagle3Student(head, target, block_size=5, n_anchors=1)
    monkeypatch.setattr("blockpilot.drafters.eagle3.load_head", lambda *given: head)
    method = student.method(tmp_path)
    method.bind(target)
    walked, decoded = walked_and_decoded(
        student.tau, corpus, method, target, batch, temperature, 20
    )
    assert walked == decoded
    assert len(set(decoded)) > 1, "else the law would hold for any walk"
