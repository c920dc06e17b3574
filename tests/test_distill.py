"""The distill stage end to end on a tiny target: the drafter it leaves, resuming, refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stages_kit import (
    command,
    composed,
    distill_arguments,
    distill_prompts,
    entered,
    executed,
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
from blockpilot.decoding.loop import Method
from blockpilot.decoding.target import Target
from blockpilot.distill import __main__ as distill
from blockpilot.distill import responses
from blockpilot.distill.corpus import Corpus
from blockpilot.distill.dflash import replayed_tau
from blockpilot.distill.responses import Request, shard_file, write_responses
from blockpilot.distill.trainer import DrafterTrainer
from blockpilot.drafters.__main__ import described
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.prompts.base import Prompt
from blockpilot.sweep import __main__ as sweep

HEART = [
    "recipe.soft_labels=0",  # random weights spread their probability: soft labels end high
    "training.steps=60",
    "training.sequences_per_step=4",
    "training.anchors_per_sequence=16",
]


@dataclass
class Run:
    """A finished distillation: its run folder, its drafter, and the losses on the way."""

    folder: Path
    drafter: Path
    losses: list[float]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A drafter that knows seven answers by heart."""
    folder = tmp_path_factory.mktemp("distill")
    losses: list[float] = []

    def log(tracker: NullTracker, values: Mapping[str, float], *, step: int) -> None:
        losses.extend(value for key, value in values.items() if key == "train/loss")

    arguments = distill_arguments(folder, distill_prompts(folder), *HEART, "export=speculators")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NullTracker, "log", log)
        drafter = performed(distill.run, "distill", *arguments, "training.evaluate_every=60")
    return Run(folder / "distill" / "run", drafter, losses)


def test_training_lowers_the_loss_on_what_can_be_learnt_by_heart(run: Run) -> None:
    assert len(run.losses) == 60
    assert sum(run.losses[-5:]) / 5 < run.losses[0] / 2


def test_the_drafter_has_the_published_form(run: Run) -> None:
    assert run.drafter == run.folder / "drafter"
    config = json.loads((run.drafter / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["model_type"], config["block_size"]) == ("qwen3", 4)
    assert config["num_target_layers"] == 4
    # The mask is the first embedding row past the tokenizer's 259 entries.
    assert config["dflash_config"] == {"mask_token_id": 259, "target_layer_ids": [2]}
    weights = load_file(run.drafter / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    layer = {f"self_attn.{part}_proj" for part in "qkvo"}
    layer |= {"self_attn.q_norm", "self_attn.k_norm", "input_layernorm"}
    layer |= {"post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    wanted = {f"layers.0.{name}.weight" for name in layer}
    assert set(weights) == wanted | {"norm.weight", "fc.weight", "hidden_norm.weight"}
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_the_exported_drafter_is_the_same(run: Run) -> None:
    """In speculators' form, which counts layers from the embeddings."""
    beside = run.folder / "drafter-speculators"
    config = json.loads((beside / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [3]
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    told, same = (dict(described(str(folder))) for folder in (run.drafter, beside))
    for fact in ("reads layers", "block", "layers", "mask token", "parameters"):
        assert told[fact] == same[fact]
    one, other = (load_file(each / "model.safetensors") for each in (run.drafter, beside))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_card_tells_data_recipe_and_measurement(run: Run) -> None:
    card = (run.drafter / "README.md").read_text()
    shards = sorted((run.folder / "responses/distill/local").glob("shard-*.parquet"))
    assert f"| local | 7 | {Corpus(shards).response_tokens} |" in card
    for part in ("60 optimizer steps", "seed 0", "learning_rate: 0.03", "2 prompts per set"):
        assert part in card
    assert "Apache-2.0" in card
    assert "macro tau |\n|---|---|\n| local | 1." in card


def test_a_sweep_loads_the_drafter_and_profits_from_it(run: Run, tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", texts_of("distill", 7))
    records = performed(
        sweep.run,
        "sweep",
        *sweep_arguments(tmp_path, file, "dtype=float32", "decoding.temperature=0"),
        f"drafter.checkpoint={run.drafter}",
        "decoding.max_new_tokens=12",
    )
    assert set(records["block_size"]) == {1, 3, 4, 5}
    assert (records.groupby("prompt_id")["output_sha256"].nunique() == 1).all()
    trained = records[records["block_size"] == 4]
    assert set(trained["trained_block_size"]) == {4}
    assert set(trained["drafter_checkpoint"].str.split("@").str[0]) == {str(run.drafter)}
    committed = [count for row in trained["committed"] for count in row]
    assert sum(committed) / len(committed) > 1.5, "these answers were learnt by heart"


@torch.no_grad()
def exact_target(run: Run) -> Target:
    """The target of the run, with the same weights in float64."""
    cfg = composed("distill", *distill_arguments(run.folder, run.folder))
    target = load_target(cfg)
    return Target(target.model.double(), target.tokenizer)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_walk_over_stored_answers_gives_the_loops_tau(
    run: Run, tmp_path: Path, temperature: float
) -> None:
    target = exact_target(run)
    drafter = DFlashDrafter(checkpoint=str(run.drafter), ignore_keys=[], head=None)
    method = Method(drafter, FixedPolicy(block_size=4, block_mode="draft"))
    method.bind(target)
    assert drafter.network is not None
    settings = response_settings(temperature, 0, 12, (2,), 9)
    texts = [*texts_of("distill", 7), "a longer one", "x"]
    batch = [
        Request(Prompt(text, "s", (text,), "distill"), target.tokenizer(text)["input_ids"])
        for text in texts
    ]
    write_responses(target, batch, tmp_path, 0, settings)
    corpus = Corpus([shard_file(tmp_path, 0)])
    walked, decoded = walked_and_decoded(
        partial(replayed_tau, drafter.network, target),
        corpus,
        method,
        target,
        batch,
        temperature,
        12,
    )
    assert walked == decoded
    if temperature == 0:
        assert max(decoded) > 2, "else the law would hold for any walk"
        assert len(set(decoded)) > 2


def checkpoint(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "distill/run/checkpoint.pt", weights_only=True)
    return state


def same(first: Any, second: Any) -> bool:
    """Bit for bit, in nested containers."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a training of six steps ran through."""
    folder = tmp_path_factory.mktemp("through")
    performed(distill.run, "distill", *distill_arguments(folder, distill_prompts(folder)))
    return folder


OTHER_LOSS = ["recipe.gamma=4", "recipe.sampled_negatives=50"]


@pytest.mark.parametrize(
    ("updates", "recipe", "more"),
    [
        (1, "dflash", []),
        (3, "dflash", []),
        (5, "dflash", []),
        (3, "dflash", OTHER_LOSS),
        (3, "specblock", []),
    ],
)
def test_an_interrupted_training_ends_with_the_same_bits(
    through: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    updates: int,
    recipe: str,
    more: list[str],
) -> None:
    """Saved after steps 2 and 4, so one update is lost and made again."""
    whole = through
    if more or recipe != "dflash":
        whole = tmp_path / "whole"
        whole.mkdir()
        given = distill_arguments(whole, distill_prompts(whole), *more, recipe=recipe)
        performed(distill.run, "distill", *given)
    arguments = distill_arguments(tmp_path, distill_prompts(tmp_path), *more, recipe=recipe)
    update, made = DrafterTrainer._update, []

    def interrupted(trainer: DrafterTrainer, batch: list[int]) -> float:
        if len(made) == updates:
            raise KeyboardInterrupt
        made.append(trainer.step)
        return update(trainer, batch)

    monkeypatch.setattr(DrafterTrainer, "_update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        performed(distill.run, "distill", *arguments)
    assert made == list(range(updates))
    monkeypatch.setattr(DrafterTrainer, "_update", update)
    drafter = performed(distill.run, "distill", *arguments)
    first, second = checkpoint(whole), checkpoint(tmp_path)
    assert (first.pop("seconds"), second.pop("seconds")) > (0, 0)
    assert first["step"] == 6
    assert same(first, second)
    name = "model.safetensors"
    assert (drafter / name).read_bytes() == (whole / "distill/run/drafter" / name).read_bytes()


def test_a_finished_training_is_not_repeated(
    through: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrafterTrainer, "_update", lambda *rest: pytest.fail("a step was made"))
    arguments = distill_arguments(through, through / "prompts.jsonl")
    assert performed(distill.run, "distill", *arguments) == through / "distill/run/drafter"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("training.learning_rate=1e-3", "a checkpoint in .* learning_rate=0.03, this run has 0.00"),
        ("training.steps=8", "a checkpoint in .* made with steps=6, this run has 8"),
        ("recipe.n_layers=2", "a checkpoint in .* made with recipe.n_layers=1, this run has 2"),
        ("new_drafter.block_size=5", "a checkpoint in .* made with block_size=4, this run has 5"),
        ("seed=1", "responses in .* made with seed=0, this run has 1"),
        ("decoding.temperature=1", "responses in .* made with temperature=0.0, this run has 1.0"),
        ("decoding.max_new_tokens=13", "responses in .* max_new_tokens=12, this run has 13"),
        ("responses.batch_size=4", "responses in .* batch_size=3, this run has 4"),
        ("dtype=bfloat16", "responses in .* dtype=float32, this run has bfloat16"),
        ("responses.store_features=false", r"responses in .* feature_layers=\[2\], this run has"),
        ("responses.limit=4", "holds responses to other prompts than this run asks for"),
    ],
)
def test_changed_settings_are_refused_by_name(through: Path, change: str, told: str) -> None:
    arguments = distill_arguments(through, through / "prompts.jsonl")
    with pytest.raises(UserError, match=told) as caught:
        performed(distill.run, "distill", *arguments, change)
    assert "\n" not in str(caught.value)


def test_training_goes_on_from_the_weights_of_another_drafter(
    through: Path, tmp_path: Path
) -> None:
    first = through / "distill/run/drafter"
    given = distill_arguments(tmp_path, distill_prompts(tmp_path), f"training.init={first}")
    unchanged = performed(distill.run, "distill", *given, "training.steps=0", "run_id=none")
    name = "model.safetensors"
    assert (unchanged / name).read_bytes() == (first / name).read_bytes()
    trained = performed(distill.run, "distill", *given)
    assert (trained / name).read_bytes() != (first / name).read_bytes()
    with pytest.raises(UserError, match=r"training.init=.*: num_hidden_layers=1, .* ask for 2"):
        performed(distill.run, "distill", *given, "recipe.n_layers=2", "run_id=other")


def test_a_compiled_training_makes_the_same_drafter(through: Path, tmp_path: Path) -> None:
    """By the backend that only traces: inductor fuses, so its bits may differ."""
    given = distill_arguments(tmp_path, distill_prompts(tmp_path), "training.compile=eager")
    compiled = performed(distill.run, "distill", *given)
    eager = through / "distill/run/drafter"
    first, second = (load_file(folder / "model.safetensors") for folder in (eager, compiled))
    assert same(first, second)


def test_how_often_to_log_may_change(through: Path) -> None:
    arguments = distill_arguments(through, through / "prompts.jsonl")
    performed(distill.run, "distill", *arguments, "training.log_every=3")


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("prompts.split=distill", "prompts.split=distill: distill learns from the distill split"),
        ("decoding.top_k=5", "decoding.top_k=5, decoding.top_p=1.0: responses are the target's"),
        ("decoding.top_p=0.5", "decoding.top_p=0.5: responses are the target's unfiltered ones"),
        ("dtype=float64", "dtype=float64: training computes in bfloat16 or float32"),
        ("recipe.mask_token_id=300", "mask_token_id=300, allowed are 0..299"),
        ("recipe.n_target_layers=2", "a target of 4 layers has room for 1..1"),
        ("new_drafter.block_size=1", "new_drafter.block_size=1: must be a number >= 2"),
        ("training.compile=x", "training.compile=x: must be inductor, aot_eager, eager"),
        (
            "+responses.self_written.own={count:4,opening:Write}",
            "responses.self_written: the target has no chat template",
        ),
        ("training.init=nowhere", "nowhere"),
        ("prompts.path=few.jsonl", "no prompt falls into split validation (there are: distill 2,"),
        ("model.architecture.vocab_size=259", "no embedding row past its tokenizer's 259 entries"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_answered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mistake: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_prompts(Path("few.jsonl"), texts_of("distill", 2))
    monkeypatch.setattr(
        responses, "write_responses", lambda *rest: pytest.fail("a prompt was answered")
    )
    given = distill_arguments(tmp_path, distill_prompts(tmp_path), mistake)
    assert entered(monkeypatch, distill.main, *given) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("blockpilot.distill: error: ")
    assert told in line


def test_two_processes_share_the_answers_and_train_one_drafter(
    through: Path, tmp_path: Path
) -> None:
    arguments = distill_arguments(tmp_path, distill_prompts(tmp_path), "training.steps=2")
    code, _, told = executed(command("distill", *arguments, processes=2), tmp_path)
    assert code == 0, told
    folder = tmp_path / "distill" / "run"
    shards = sorted((through / "distill/run/responses").rglob("shard-*"))
    assert len(shards) == 8
    for shard in shards:
        mine = tmp_path / shard.relative_to(through)
        assert mine.read_bytes() == shard.read_bytes()
    assert json.loads((folder / "training.json").read_text())["processes"] == 2
    assert checkpoint(tmp_path)["step"] == 2
    weights = load_file(folder / "drafter" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
