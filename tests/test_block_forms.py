"""Published forms of block drafters: read whole, under the output law, replayed as decoded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import forms_kit as forms
import pytest
import reference as ref
import torch
from decoding_kit import PROMPT, plain, sampler, tiny_target, with_stops
from safetensors.torch import save_file
from test_dflash import view
from test_replay import compare
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.native import compiler
from blockpilot.decoding.native.target import NativeTarget
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.drafters.forms.dflash import DFlashConfig
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.policies.tree import TreePolicy

Raw = dict[str, Any]
# The names that files have and the network has not.
PUBLISHED = (
    ("path.candidate_selector.", "candidate_selector."),
    ("path.markov", "markov_head.markov"),
    ("path.gate", "markov_head.gate"),
    ("path.joint", "markov_head.joint"),
    ("path.", ""),
)
TINY: Raw = {
    "aux_hidden_state_layer_ids": [1, 3],
    "conv_group_size": 4,
    "draft_vocab_size": 31,
    "emb_dim": 12,
    "gru_hidden_dim": 20,
    "markov_rank": 8,
    "selector_rank": 8,
    "selector_top_k": 6,
    "sliding_window": 7,
}


def tiny(name: str) -> Raw:
    """A form's config.json for a tiny target."""
    raw = forms.shrunk(forms.BLOCK_FORMS[name][0], **TINY)
    for part in (raw, *(raw[key] for key in forms.NESTED if key in raw)):
        if "layer_types" in part:
            part["layer_types"] = forms.BLOCK_FORMS[name][0].get("layer_types", [])[-2:] or (
                ["sliding_attention"] * 2 if "sliding" in name else ["full_attention"] * 2
            )
    if name == "DeepSpec dflash":
        raw["markov_rank"] = 0
    return raw


def write(name: str, folder: Path) -> dict[str, Tensor]:
    """A checkpoint of a form with random weights under the published names."""
    raw = tiny(name)
    own_head = name.startswith("speculators") and "draft_vocab_size" in raw
    config = DFlashConfig.parse(raw, name, tensors=["lm_head.weight"] if own_head else [])
    network = DFlashNetwork(config)
    draw = torch.Generator().manual_seed(3)
    state = network.state_dict()
    for key, tensor in state.items():
        if tensor.is_floating_point():
            scale = 0.3 if tensor.dim() > 1 else 0.2
            tensor.copy_(scale * torch.randn(tensor.shape, generator=draw) + (tensor.dim() == 1))
        if key == "d2t":
            tensor.copy_(torch.arange(len(tensor)))  # every other token
    weights = {}
    for key, tensor in state.items():
        for ours, theirs in PUBLISHED:
            if key.startswith(ours):
                key = theirs + key.removeprefix(ours)
        weights[key] = tensor.contiguous()
    if forms.BLOCK_FORMS[name][0].get("enable_confidence_head"):
        weights["confidence_head.proj.weight"] = torch.ones(1, 40)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors")
    return weights


def loaded(name: str, folder: Path) -> DFlashDrafter:
    write(name, folder)
    drafter = DFlashDrafter(checkpoint=str(folder), ignore_keys=[], head=None)
    drafter.bind(tiny_target("qwen3"))
    return drafter


@pytest.mark.parametrize("name", forms.BLOCK_FORMS)
def test_a_published_form_is_read_whole(name: str) -> None:
    raw, said = forms.BLOCK_FORMS[name]
    config = DFlashConfig.parse(raw, name, tensors=["lm_head.weight"] * ("draft_vocab_size" in raw))
    for field, value in said.items():
        assert getattr(config, field) == value, field
    assert config.plain == (name == "z-lab")
    assert json.dumps(config.identity())
    with pytest.raises(UserError, match="fancy=1, which is not known here"):
        DFlashConfig.parse({**raw, "fancy": 1}, name, tensors=["lm_head.weight"])


def test_what_differs_is_told_apart() -> None:
    """Two forms of the same tensors never share a fingerprint."""
    identities = [
        json.dumps(DFlashConfig.parse(raw, name, tensors=["lm_head.weight"]).identity())
        for name, (raw, _) in forms.BLOCK_FORMS.items()
    ]
    assert len(set(identities)) == len(identities)


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("z-lab, sliding", {"sliding_window": None}, "lacks the key sliding_window"),
        ("z-lab, sliding", {"use_sliding_window": False}, "but layer_types has sliding_attention"),
        ("z-lab, sliding", {"layer_types": ["x"] * 5}, "layer_types=x, allowed are full_attention"),
        ("z-lab", {"layer_types": ["full_attention"]}, "must name 5 layers"),
        ("z-lab", {"is_causal": "yes"}, "is_causal=yes, allowed are true and false"),
        ("JetSpec", {"is_causal": False}, "causal_head=True, but is_causal=False"),
        ("DFlash2", {"dflash_config": {}}, "lacks the key conv_kernel_size"),
        ("Gemma 4", {"output_multiplier": 0}, "output_multiplier=0 must be a number > 0"),
        ("DeepSpec dspark", {"markov_head_type": "x"}, "allowed are vanilla, gated and rnn"),
        ("speculators dflash", {"speculators_model_type": "eagle3"}, "drafter=eagle3"),
        (
            "speculators dspark",
            {"markov_head_type": "rnn", "sample_from_anchor": False},
            "needs sample_from_anchor=true",
        ),
        ("speculators dflash", {"hidden_size": 7}, "transformer_layer_config.hidden_size=4096"),
        ("speculators dflash", {"transformer_layer_config": None}, "must hold the keys of the la"),
    ],
)
def test_what_a_form_cannot_say_is_refused(name: str, keys: Raw, told: str) -> None:
    with pytest.raises(UserError) as caught:
        DFlashConfig.parse(forms.BLOCK_FORMS[name][0] | keys, name, tensors=["lm_head.weight"])
    assert told in str(caught.value)


@pytest.mark.parametrize("name", forms.BLOCK_FORMS)
def test_a_form_is_under_the_law_and_replayed_as_decoded(name: str, tmp_path: Path) -> None:
    target, drafter = with_stops(tiny_target("qwen3"), 3, 33), loaded(name, tmp_path)
    for temperature in (0.0, 1.0):
        choose = sampler(temperature)
        wanted = plain(target, 16, choose).tokens
        tree: Any = TreePolicy(nodes=9, cost=None, fit=None, online=False)
        for policy in (tree, *(FixedPolicy(block_size=n, block_mode="draft") for n in (2, 6, 9))):
            method = Method(drafter, policy)
            method.bind(target)
            assert decode(target, method, PROMPT, choose, 16).tokens == wanted
    compare(target, drafter, 1.0, chunk=7)


@pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", forms.BLOCK_FORMS)
def test_a_form_drafts_the_same_with_kernels(name: str, tmp_path: Path) -> None:
    eager, drafter = tiny_target("qwen3"), loaded(name, tmp_path)
    native = NativeTarget(eager)
    ids = torch.tensor(PROMPT * 4)
    found = []
    for target in (eager, native):
        drafter.bind(target)
        features = ref.reference_features(eager.model, ids.tolist(), drafter.feature_layers)
        seen = view(target, ids, 19, features[:19])
        drafter.start(seen, 40)
        found.append(drafter.draft(seen, 6))
    for draft in found:
        assert draft.tokens.tolist() == found[0].tokens.tolist()
        torch.testing.assert_close(draft.logits, found[0].logits)
    kernels = drafter._stack is not None
    assert kernels == ("sliding" not in name and "DFlash2" not in name and "dflash2" not in name)


@pytest.mark.parametrize("name", forms.BLOCK_FORMS)
def test_cached_blocks_equal_packed_ones(name: str, tmp_path: Path) -> None:
    """The two ways of the same function, context beyond any window."""
    drafter = loaded(name, tmp_path)
    network = drafter.network
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(24, network.fc.in_features, generator=draw, dtype=torch.float64)
    x = torch.randn(1, 5, 32, generator=draw, dtype=torch.float64)
    cos, sin = network.rope(torch.arange(40), torch.float64)
    slab = torch.zeros(2, 2, 1, 2, 40, 8, dtype=torch.float64)
    for anchor in (0, 3, 20):
        packed = network(features, x, torch.tensor([anchor]))[:, network.first :]
        network.read(features[None, :anchor], slab, 0, cos[:anchor], sin[:anchor])
        end = anchor + 5
        cached = network.block(x, slab, anchor, cos[anchor:end], sin[anchor:end])
        torch.testing.assert_close(cached, packed)


def test_no_slot_sees_past_its_window_or_ahead_where_it_must_not(tmp_path: Path) -> None:
    """By what a change of one context row or one slot moves."""
    for name, moved_by_context, moved_by_slot in (
        ("z-lab", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ("JetSpec", [0, 1, 2, 3, 4], [2, 3, 4]),
        # Context row 16 lies 4 before the anchor; a window of 7 ends with slot 2.
        ("z-lab, sliding, not causal", [0, 1, 2], [0, 1, 2, 3, 4]),
        ("speculators dflash, sliding", [0, 1, 2, 3, 4], [2, 3, 4]),
    ):
        network = loaded(name, tmp_path / re.sub(r"\W", "-", name)).network
        network.layers = network.layers[:1]
        network.__dict__["sights"] = network.sights[:1]
        draw = torch.Generator().manual_seed(1)
        features = torch.randn(20, network.fc.in_features, generator=draw, dtype=torch.float64)
        x = torch.randn(1, 5, 32, generator=draw, dtype=torch.float64)
        before = network(features, x, torch.tensor([20]))[0]
        other = features.clone()
        other[16] += 1
        moved = (network(other, x, torch.tensor([20]))[0] - before).abs().amax(dim=-1) > 1e-9
        assert moved.nonzero().flatten().tolist() == moved_by_context, name
        y = x.clone()
        y[0, 2] += 1
        moved = (network(features, y, torch.tensor([20]))[0] - before).abs().amax(dim=-1) > 1e-9
        assert moved.nonzero().flatten().tolist() == moved_by_slot, name
