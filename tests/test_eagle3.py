"""The EAGLE-3 drafter against a slow reference, and the published forms of its heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import PROMPT, plain, sampler, tiny_target
from reference import reference_features
from reference_eagle3 import tree
from safetensors.torch import save_file
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.types import Draft, View
from blockpilot.decoding.verify import accepted_path
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.eagle3 import Eagle3Drafter, random_head
from blockpilot.drafters.forms.eagle3 import Eagle3Config, default_layers
from blockpilot.drafters.prompt_lookup import PromptLookupDrafter
from blockpilot.policies.fixed import FixedPolicy

BUDGET = 14


class Recorded(Eagle3Drafter):
    """Keeps where it was asked and what it proposed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.drafts: list[tuple[int, Draft]] = []

    def draft(self, view: View, n_slots: int) -> Draft:
        made = super().draft(view, n_slots)
        self.drafts.append((view.position, made))
        return made


def published(kind: str = "llama") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A random head whose proposals are varied, as tensors and config.json."""
    head = random_head(tiny_target(kind))
    state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.dim() == 2:
            tensor.normal_(0, 0.3, generator=generator)
        elif tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)
    return state, head.config.published()


def write(folder: Path, state: dict[str, Tensor], raw: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("depth", "top_k", "size"), [(3, 3, 9), (2, 4, 21), (4, 1, 5), (5, 2, 3)])
def test_its_trees_are_the_references(
    depth: int, top_k: int, size: int, kind: str, tmp_path: Path
) -> None:
    target, (state, raw) = tiny_target(kind), published(kind)
    layers = default_layers(4, "x")
    if kind == "qwen3":  # two layers, named
        layers = (2, 0)
        state["fc.weight"] = state["fc.weight"][:, :64].contiguous()
        del raw["eagle_config"]
        raw["eagle_aux_hidden_state_layer_ids"] = [3, 1]
    folder = str(write(tmp_path / "head", state, raw))
    drafter = Recorded(checkpoint=folder, ignore_keys=[], depth=depth, top_k=top_k, block_size=size)
    method = Method(drafter, FixedPolicy(block_size=size, block_mode="draft"))
    method.bind(target)
    trace = decode(target, method, PROMPT, sampler(1.0), BUDGET)
    text = [*PROMPT, *plain(target, BUDGET + size, sampler(1.0)).tokens]
    assert [*PROMPT, *trace.tokens] == text[: len(PROMPT) + BUDGET]
    features = reference_features(target.model, text, layers)
    weights = {name: tensor.double() for name, tensor in state.items() if name != "d2t"}
    weights["d2t"] = state["d2t"]
    embedding = target.model.get_input_embeddings().weight.detach()
    assert len(drafter.drafts) == len(trace.committed) > 3
    for (position, draft), committed in zip(drafter.drafts, trace.committed, strict=True):
        nodes = tree(
            *(weights, raw, embedding, text[: position + 1], features[:position]),
            *(min(depth, size - 2), top_k, size - 1),
        )
        assert draft.tokens.tolist() == [node.token for node in nodes]
        number = {id(node): i for i, node in enumerate(nodes, start=1)}
        parents = [number[id(node.parent)] if node.parent else 0 for node in nodes]
        assert list(draft.parents or range(len(nodes))) == parents
        proposed = [text[position], *draft.tokens.tolist()]
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        chosen = [text[position + 1 + d] for d in depths]
        # Off the path the target's own token is another one, so nothing more is accepted there.
        accepted = accepted_path(chosen, proposed, parents)
        assert committed <= len(accepted)
        assert committed == len(accepted) or position + committed == len(PROMPT) + BUDGET - 1


def test_more_of_a_tree_accepts_no_less(tmp_path: Path) -> None:
    target = tiny_target()
    folder = str(write(tmp_path / "head", *published()))
    cycles = []
    for size in (2, 6, 30):
        drafter = Eagle3Drafter(
            checkpoint=folder, ignore_keys=[], depth=4, top_k=8, block_size=size
        )
        method = Method(drafter, FixedPolicy(block_size=None, block_mode="draft"))
        method.bind(target)
        trace = decode(target, method, PROMPT, sampler(1.0), 60)
        assert max(trace.verified) <= size
        cycles.append(len(trace.committed))
    assert cycles[0] > cycles[2], "else a tree would be worth nothing"


def refused(folder: Path | str, *told: str, kind: str = "llama") -> None:
    with pytest.raises(UserError) as caught:
        Eagle3Drafter(checkpoint=str(folder), ignore_keys=[], depth=1, top_k=2, block_size=4).bind(
            tiny_target(kind)
        )
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in told), str(caught.value)


def drafts_of(folder: Path) -> Tensor:
    """What a head proposes first, with the target's features of the prompt."""
    target = tiny_target()
    drafter = Recorded(checkpoint=str(folder), ignore_keys=[], depth=2, top_k=3, block_size=9)
    method = Method(drafter, FixedPolicy(block_size=None, block_mode="draft"))
    method.bind(target)
    decode(target, method, PROMPT, sampler(0.0), 2)
    return drafter.drafts[0][1].tokens


def test_published_forms_of_one_head_propose_the_same(tmp_path: Path) -> None:
    state, raw = published()
    wanted = drafts_of(write(tmp_path / "ours", state, raw))
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
    pickled = write(tmp_path / "bin", {}, {**raw, "head_dim": 999})  # read off the weights
    (pickled / "model.safetensors").unlink()
    torch.save(state, pickled / "pytorch_model.bin")
    embedding = tiny_target().model.get_input_embeddings().weight.detach().float().clone()
    own = {**state, "embed_tokens.weight": embedding}
    lacking = {name: tensor for name, tensor in state.items() if name != "t2d"}
    for folder in (
        write(tmp_path / "renamed", renamed, raw),
        pickled,
        write(tmp_path / "own", own, raw),
        write(tmp_path / "lacking", lacking, raw),
    ):
        assert drafts_of(folder).tolist() == wanted.tolist(), folder.name


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    state, raw = published()
    folder = write(tmp_path / "head", {}, raw)
    (folder / "model.safetensors").unlink()
    torch.save({**state, "more": print}, folder / "pytorch_model.bin")
    refused(folder, "cannot read")


@pytest.mark.parametrize("name", ["fc.weight", "d2t", "midlayer.mlp.up_proj.weight", "norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    state, raw = published()
    del state[name]
    refused(write(tmp_path, state, raw), f"tensor {name} is missing")


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    state, raw = published()
    refused(write(tmp_path / "a", state, {**raw, "vocab_size": 77}), "vocab_size=77", "another")
    wide = {**state, "fc.weight": torch.zeros(32, 100)}
    refused(write(tmp_path / "b", wide, raw), "fc reads 100 features")
    refused(write(tmp_path / "c", {**state, "more": torch.zeros(1)}, raw), "unknown tensor more")
    far = {**state, "d2t": state["d2t"] + 60}
    refused(write(tmp_path / "d", far, raw), "outside the target's vocabulary")
    del far["t2d"]
    refused(write(tmp_path / "d2", far, raw), "outside the target's vocabulary")
    short = {**far, "d2t": state["d2t"][:-1]}
    refused(write(tmp_path / "d3", short, raw), "d2t has shape [30]")
    refused(
        write(tmp_path / "e", state, {**raw, "num_hidden_layers": 2}),
        "tensor layers.1.self_attn.q_proj.weight is missing",
    )
    refused(write(tmp_path / "h", state, {**raw, "hidden_size": "32"}), "hidden_size=32 must be")


def test_settings_that_cannot_be_are_refused() -> None:
    good: dict[str, Any] = {
        "checkpoint": "random",
        "ignore_keys": [],
        "depth": 1,
        "top_k": 2,
        "block_size": 4,
    }
    for key, value in (("depth", -1), ("top_k", 0), ("block_size", 1)):
        with pytest.raises(UserError, match=f"drafter.{key}={value}: allowed are"):
            Eagle3Drafter(**{**good, key: value})
    with pytest.raises(UserError, match=r"checkpoint=null: no EAGLE-3 head of .* is known"):
        Eagle3Drafter(**{**good, "checkpoint": None}).bind(tiny_target())
    with pytest.raises(UserError, match=r"checkpoint=null: no DFlash drafter of .* is known"):
        DFlashDrafter(checkpoint=None, ignore_keys=[], head=None).bind(tiny_target())


@pytest.mark.parametrize("name", ["dflash", "eagle3"])
def test_a_drafter_in_16_bits_turns_by_the_angles_it_was_trained_with(name: str) -> None:
    shape: dict[str, Any] = {"depth": 1, "top_k": 1, "block_size": 4}
    drafter = (
        DFlashDrafter(checkpoint="random", ignore_keys=[], head=None)
        if name == "dflash"
        else Eagle3Drafter(checkpoint="random", ignore_keys=[], **shape)
    )
    turned = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter.bind(tiny_target("qwen3", dtype=dtype))
        assert drafter.network is not None
        assert next(drafter.network.parameters()).dtype == dtype
        turned.append(drafter.network.rope(torch.arange(2000), torch.float32))
    torch.testing.assert_close(turned[1], turned[0], rtol=0, atol=0)


def test_what_shapes_its_drafts_is_in_its_fingerprint() -> None:
    """Rows of another tree under the same weights would be taken for these."""
    seen = set()
    for depth, top_k in ((1, 2), (2, 2), (1, 1)):
        drafter = Eagle3Drafter(
            checkpoint="random", ignore_keys=[], depth=depth, top_k=top_k, block_size=4
        )
        drafter.bind(tiny_target())
        seen.add(drafter.fingerprint)
    assert len(seen) == 3
    lookups = [PromptLookupDrafter(max_ngram=n, block_size=8).fingerprint for n in (2, 3)]
    assert lookups[0] != lookups[1]


def test_a_block_larger_than_what_is_verified_needs_marginals() -> None:
    """The first nodes of a tree are not its best."""
    drafter = Eagle3Drafter(checkpoint="random", ignore_keys=[], depth=2, top_k=3, block_size=9)
    method = Method(drafter, FixedPolicy(block_size=4, block_mode="verify"))
    with pytest.raises(UserError, match=r"block_mode=verify: drafter eagle3 .*allowed is draft"):
        method.bind(tiny_target())


def test_a_config_survives_being_written(tmp_path: Path) -> None:
    state, raw = published()
    assert Eagle3Config.parse(raw, state, "x", 4).published() == raw


def test_layers_read_are_those_that_enter_2_half_and_l_minus_3() -> None:
    assert default_layers(36, "x") == (1, 17, 32)
    assert default_layers(30, "x") == (1, 14, 26)


def test_unrolled_training_steps_are_those_of_drafting(tmp_path: Path) -> None:
    """A chain's states, one anchor at a time, against all anchors at once."""
    target, (state, raw) = tiny_target(), published()
    folder = str(write(tmp_path / "head", state, raw))
    drafter = Eagle3Drafter(checkpoint=folder, ignore_keys=[], depth=4, top_k=1, block_size=6)
    method = Method(drafter, FixedPolicy(block_size=None, block_mode="draft"))
    method.bind(target)
    network = drafter.network
    assert network is not None
    text = torch.tensor([*PROMPT, *plain(target, 20, sampler(1.0)).tokens])
    features = reference_features(target.model, text.tolist(), default_layers(4, "x"))[:-1]
    anchors = torch.tensor([5, 6, 11, 19])

    def greedy(step: int, output: Tensor) -> Tensor:
        if step == 0:
            return target.embed(text[anchors])
        drawn.append(network.target_ids(network.lm_head(output).argmax(dim=-1)))
        return target.embed(drawn[-1])

    drawn: list[Tensor] = []
    with torch.no_grad():
        outputs = network.unroll(features, target.embed(text[1:]), anchors, 5, greedy)
        drawn.append(network.target_ids(network.lm_head(outputs[:, -1]).argmax(dim=-1)))
        read = torch.stack([target.embed(t) for t in [text[anchors], *drawn[:-1]]], dim=1)
        torch.testing.assert_close(
            network(features, target.embed(text[1:]), anchors, read), outputs
        )
        for row, anchor in enumerate(anchors.tolist()):
            forward = target.forward(text[:anchor], target.new_cache(40), n_logits=1)
            view = View(
                text[:anchor], text[anchor : anchor + 1], anchor, features[:anchor], forward
            )
            drafter.start(view, 60)
            assert drafter.draft(view, 6).tokens.tolist() == [int(t[row]) for t in drawn]
