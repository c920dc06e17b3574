"""Training of SpecBlock drafters: the loss by hand, the stage, the walk against the loop."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from decoding_kit import tiny_target
from reference import reference_features, reference_logits
from reference_specblock import blocks, draft_logits
from safetensors.torch import load_file
from specblock_kit import Exact, flat, published
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
from torch import Tensor

from blockpilot.app.target import load_target
from blockpilot.base.errors import UserError
from blockpilot.decoding.target import Target
from blockpilot.distill import __main__ as distill
from blockpilot.distill.blocks import sample_anchors
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.responses import Request, shard_file, write_responses
from blockpilot.distill.specblock import SpecBlockRecipe, SpecBlockStudent, slot_losses
from blockpilot.drafters.specblock import load_specblock, new_specblock
from blockpilot.drafters.specblock_loss import draft_loss, rank_loss
from blockpilot.drafters.specblock_net import SpecBlockConfig
from blockpilot.prompts.base import Prompt
from blockpilot.sweep import __main__ as sweep

HEART = [
    "training.steps=80",
    "training.sequences_per_step=4",
    "training.anchors_per_sequence=16",
    "training.evaluate_every=80",
]


# --- the loss ----------------------------------------------------------------------------------


def test_a_prefix_that_went_wrong_teaches_nothing_behind_it() -> None:
    soft = torch.tensor([[[1.0, 2.0, 4.0]], [[3.0, 8.0, 16.0]]], requires_grad=True)  # [2, 1, 3]
    classes = torch.tensor([[[0, 0, 2]], [[0, 1, 0]]])
    everything = torch.ones(2, 1, 3, dtype=torch.bool)
    loss = draft_loss(soft, classes, everything)
    # Slots 0 and 1 of both blocks count, slot 2 only of the first.
    assert loss.item() == pytest.approx((1 + 3) / 2 + 0.8 * (2 + 8) / 2 + 0.64 * 4)
    loss.backward()
    assert soft.grad is not None
    assert (soft.grad[1, 0] > 0).tolist() == [True, True, False]
    # What the draft vocabulary lacks has the last class: its slot and all behind it are out.
    lacking = everything.clone()
    lacking[0, 0, 1] = False
    classes[0, 0, 1] = 3
    assert draft_loss(soft, classes, lacking).item() == pytest.approx(2 + 0.8 * 8)


def test_blocks_are_summed_and_slots_without_any_count_nothing() -> None:
    soft = torch.tensor([[[1.0, 5.0], [2.0, 7.0]]])  # one anchor, two blocks
    classes = torch.tensor([[[1, 0], [0, 0]]])
    everything = torch.ones(1, 2, 2, dtype=torch.bool)
    assert draft_loss(soft, classes, everything).item() == pytest.approx(1 + 2 + 0.8 * 7)


def test_ranks_are_the_drafts_rank_of_the_label() -> None:
    logits = torch.arange(24.0).flip(0)[None].repeat(8, 1)  # rank of id i is i + 1
    index = torch.tensor([0, 1, 3, 4, 9, 10, 23, 0])
    has_row = torch.tensor([True] * 7 + [False])
    normed, expected = torch.ones(8, 2), torch.tensor([[0.5, 1.0]]).repeat(8, 1)
    soft, classes = slot_losses(normed, logits, index, has_row, expected)
    assert classes.tolist() == [0, 1, 1, 2, 2, 3, 3, 3]
    total = math.log(sum(math.exp(i) for i in range(24)))
    assert soft.tolist() == pytest.approx([total - 1.5] * 8)


def slow_rank_loss(ranked: Tensor, classes: Tensor, known: Tensor) -> float:
    n_anchors, n_blocks, n_slots = classes.shape
    counts: dict[tuple[int, int], int] = {}
    for a in range(n_anchors):
        for b in range(n_blocks):
            for k in range(n_slots):
                if known[a, b, k]:
                    key = k, int(classes[a, b, k])
                    counts[key] = counts.get(key, 0) + 1
    total, n = 0.0, 0
    for a in range(n_anchors):
        for b in range(n_blocks):
            for k in range(n_slots):
                if not known[a, b, k]:
                    break
                t, p = int(classes[a, b, k]), int(ranked[a, b, k].argmax())
                kernel = [(1 + abs(c - t) + max(t - c, 0)) ** -2 for c in range(4)]
                logprobs = ranked[a, b, k].log_softmax(dim=0).tolist()
                loss = -sum(w * x for w, x in zip(kernel, logprobs, strict=True)) / sum(kernel)
                weight = (1 + abs(t - p) + max(t - p, 0)) * min(1, 10 / counts[k, t])
                total, n = total + weight * loss, n + 1
                if p != t:
                    break
    return total / n


def test_the_rank_loss_is_the_one_written_down() -> None:
    generator = torch.Generator().manual_seed(2)
    ranked = torch.randn(30, 2, 3, 4, generator=generator, requires_grad=True)
    classes = torch.randint(0, 4, (30, 2, 3), generator=generator)
    # Most predictions right, or nothing behind the first slot would count.
    classes = torch.where(
        torch.rand(30, 2, 3, generator=generator) < 0.7, ranked.argmax(-1), classes
    )
    known = torch.ones(30, 2, 3, dtype=torch.bool)
    known[28:, 1, 1:] = False
    loss = rank_loss(ranked, classes, known)
    assert loss.item() == pytest.approx(slow_rank_loss(ranked, classes, known), rel=1e-5)
    loss.backward()
    assert ranked.grad is not None
    assert not ranked.grad[29, 1, 1:].any()


def test_to_rank_a_label_too_high_costs_more_than_too_low() -> None:
    sure = 8 * torch.eye(4)

    def loss_of(predicted: int, true: int) -> float:
        one = torch.ones(1, 1, 1, dtype=torch.bool)
        return float(rank_loss(sure[predicted].view(1, 1, 1, 4), torch.tensor([[[true]]]), one))

    assert loss_of(1, 1) < loss_of(2, 1) < loss_of(1, 2) < loss_of(0, 2)


def test_the_loss_of_a_conversation_is_that_of_a_slow_rollout() -> None:
    """Labels, token inputs, continuations and the target's distribution, each looked up anew."""
    target, (state, raw) = tiny_target(), published()
    state = {**state, "lm_head.weight": state["lm_head.weight"] * 0.2}
    network = Exact(SpecBlockConfig.parse(raw, "x", 4))
    network.load_state_dict(state)
    student = SpecBlockStudent(network.double(), target, n_anchors=5)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 61, (14,), generator=generator)
    example = Example("s", ids, 4, None, None)
    for seed in range(3):
        loss = student.loss(
            *(network, nullcontext, example, student.vocabulary),
            torch.Generator().manual_seed(seed),
        )
        wanted = slow_loss(target, state, flat(raw), ids.tolist(), 4, seed)
        assert loss.item() == pytest.approx(wanted, rel=1e-4)


def slow_loss(
    target: Target,
    state: Mapping[str, Tensor],
    config: Mapping[str, object],
    ids: Sequence[int],
    prompt_length: int,
    seed: int,
) -> float:
    draws = torch.Generator().manual_seed(seed)
    anchors = sample_anchors(prompt_length, len(ids), 5, draws).tolist()
    continued = torch.randint(1, 5, (len(anchors), 2), generator=draws).tolist()
    weights = {k: v.double() if v.is_floating_point() else v for k, v in state.items()}
    embedding = target.model.get_input_embeddings().weight.detach()
    features = reference_features(target.model, list(ids), (1, 1, 0))
    draftable = [i + int(offset) for i, offset in enumerate(state["d2t"])]
    soft = torch.zeros(len(anchors), 3, 4, dtype=torch.float64)
    classes = torch.zeros(len(anchors), 3, 4, dtype=torch.int64)
    has_row, known = torch.zeros_like(classes).bool(), torch.zeros_like(classes).bool()
    ranked = torch.zeros(len(anchors), 3, 4, 4, dtype=torch.float64)
    network = Exact(SpecBlockConfig.parse(published()[1], "x", 4))
    network.load_state_dict(state)
    network.double()
    target_logits = reference_logits(target.model, ids)
    for a, anchor in enumerate(anchors):
        begins = [anchor, anchor + continued[a][0], anchor + sum(continued[a])]
        path = [
            (m, ids[min(s, len(ids) - 1)]) for m, s in zip(continued[a], begins[1:], strict=True)
        ]
        made = blocks(weights, config, embedding, ids, features, anchor - 1, path)
        for b, begin in enumerate(begins):
            for k in range(4):
                place = begin + 1 + k
                if place >= len(ids):
                    continue
                known[a, b, k] = True
                logits = draft_logits(weights, config, made[b][k])
                p = target_logits[place - 1][draftable].softmax(dim=0)
                soft[a, b, k] = -(p * logits.log_softmax(dim=0)).sum()
                has_row[a, b, k] = ids[place] in draftable
                classes[a, b, k] = 3
                if ids[place] in draftable:
                    mine = float(logits[draftable.index(ids[place])])
                    rank = 1 + sum(float(each) > mine for each in logits)
                    classes[a, b, k] = sum(rank > bound for bound in (1, 4, 10))
                with torch.no_grad():
                    ranked[a, b, k] = network.rank_head(network.norm(made[b][k]), logits)
    total = 0.0
    for b in range(3):
        for k in range(4):
            kept = [
                float(soft[a, b, k])
                for a in range(len(anchors))
                if has_row[a, b, k] and all(classes[a, b, j] == 0 for j in range(k))
            ]
            total += 0.8**k * sum(kept) / max(len(kept), 1)
    return total + slow_rank_loss(ranked, classes, known)


# --- the stage ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that knows seven answers by heart."""
    folder = tmp_path_factory.mktemp("specblock")
    arguments = distill_arguments(folder, distill_prompts(folder), *HEART, recipe="specblock")
    return performed(distill.run, "distill", *arguments)


def test_training_lowers_the_loss_of_all_slots(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the slots which count: there are the more of them the better the drafter is."""
    monkeypatch.setattr("blockpilot.drafters.specblock_loss._all_before", torch.ones_like)
    arguments = distill_arguments(tmp_path, tmp_path / "none.jsonl", recipe="specblock")
    target = load_target(composed("distill", *arguments))
    corpus = Corpus(sorted((trained.parent / "responses/distill/local").glob("*.parquet")))
    known = load_specblock(str(trained), target)
    fresh = SpecBlockRecipe(draft_vocabulary=10300).new(target, corpus, 3)
    losses = []
    for network in (fresh, known):
        student = SpecBlockStudent(network, target, n_anchors=16)
        draws = torch.Generator().manual_seed(1)
        given = nullcontext, corpus[0], student.vocabulary, draws
        losses.append(student.loss(network, *given).item())
    # Soft labels of random weights: their entropy remains.
    assert losses[1] < losses[0] - 3


def test_a_drafter_and_its_card_are_written(trained: Path) -> None:
    folder = trained
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["SpecBlockDraftModel"]
    assert config["num_slots"] == 3, "block size 4, anchor included"
    weights = load_file(folder / "model.safetensors")
    assert config["draft_vocab_size"] == len(weights["d2t"]) == int(weights["t2d"].sum())
    card = (folder / "README.md").read_text()
    assert "SpecBlock drafter" in card
    assert "draft_vocabulary: 10300" in card


def test_training_continues_from_a_drafter(trained: Path, tmp_path: Path) -> None:
    given = distill_arguments(tmp_path, distill_prompts(tmp_path), *HEART, recipe="specblock")
    given += [f"training.init={trained}", "training.steps=0"]
    again = performed(distill.run, "distill", *given)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (trained / name).read_bytes()
    shutil.copytree(trained, tmp_path / "other")
    config = json.loads((trained / "config.json").read_text())
    config["target_layer_ids"] = [2, 1, 0]
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    other = [*given, f"training.init={tmp_path / 'other'}", "training.steps=1", "run_id=other"]
    made = performed(distill.run, "distill", *other)
    answered = json.loads((made.parent / "responses/distill/local/settings.json").read_text())
    assert answered["feature_layers"] == [2, 1, 0], "it learns by what it reads"
    with pytest.raises(UserError, match=r"has \d+ tokens, recipe.draft_vocabulary=21 asks"):
        performed(distill.run, "distill", *given, "recipe.draft_vocabulary=21")
    with pytest.raises(UserError, match=r"it has 3 slots, new_drafter.block_size=5 asks for 4"):
        performed(distill.run, "distill", *given, "new_drafter.block_size=5")


def test_a_compiled_training_makes_the_same_drafter(trained: Path, tmp_path: Path) -> None:
    """By the backend that only traces: inductor fuses, so its bits may differ."""
    given = distill_arguments(tmp_path, distill_prompts(tmp_path), *HEART, recipe="specblock")
    given += [f"training.init={trained}", "training.steps=2", "training.sequences_per_step=1"]
    name = "model.safetensors"
    eager = load_file(performed(distill.run, "distill", *given) / name)
    given += ["training.compile=eager", "run_id=compiled"]
    compiled = load_file(performed(distill.run, "distill", *given) / name)
    assert all(torch.equal(eager[key], compiled[key]) for key in eager)
    assert not torch.equal(eager["fc.weight"], load_file(trained / name)["fc.weight"])


@pytest.mark.parametrize(("n_blocks", "least"), [(1, 2.0), (2, 2.5)])
def test_a_sweep_profits_from_it(
    n_blocks: int, least: float, trained: Path, tmp_path: Path
) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", texts_of("distill", 7))
    tau = []
    for checkpoint in (trained, "random"):
        records = performed(
            sweep.run,
            "sweep",
            *sweep_arguments(tmp_path, file, "dtype=float32", "decoding.temperature=0"),
            "radius=0",
            "drafter=specblock",
            f"run_id={Path(checkpoint).name}",
            f"drafter.checkpoint={checkpoint}",
            f"drafter.blocks={n_blocks}",
            "drafter.block_size=12",
            "decoding.max_new_tokens=12",
        )
        assert (records.groupby("prompt_id")["output_sha256"].nunique() == 1).all()
        widest = records[records["block_size"] == records["block_size"].max()]
        committed = [count for row in widest["committed"] for count in row]
        tau.append(sum(committed) / len(committed))
    assert tau[0] > least, "these answers were learnt by heart"
    assert tau[0] > tau[1] + 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_walk_over_stored_answers_gives_the_loops_tau(
    tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockpilot.distill.specblock.has_16_bit_products", lambda device: False)
    shared = tiny_target()
    target = Target(shared.model, shared.tokenizer)  # its answers end at its stop token
    network = new_specblock(target, torch.arange(61), 4).double()
    with torch.no_grad():
        network.lm_head.weight.copy_(target.model.get_output_embeddings().weight)
        # The features of the latest position, told as they are.
        network.fc.weight.copy_(torch.cat([torch.eye(32), torch.zeros(32, 64)], dim=1))
        network.slot_proj.weight.mul_(0.3)[:, :32] += torch.eye(32)
        network.shift.weight.copy_(torch.eye(32, 64))
    settings = response_settings(temperature, 0, 60, (1, 1, 0), 9)
    batch = [
        Request(Prompt(text, "s", (text,), "distill"), [3 + i, 9, 20 + i])
        for i, text in enumerate(texts_of("distill", 6))
    ]
    write_responses(target, batch, tmp_path, 0, settings)
    corpus = Corpus([shard_file(tmp_path, 0)])
    student = SpecBlockStudent(network, target, n_anchors=1)
    monkeypatch.setattr("blockpilot.drafters.specblock.load_specblock", lambda *given: network)
    method = student.method(tmp_path)
    method.bind(target)
    walked, decoded = walked_and_decoded(
        student.tau, corpus, method, target, batch, temperature, 60
    )
    assert walked == decoded
    assert len(set(decoded)) > 1, "else the law would hold for any walk"
