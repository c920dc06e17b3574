"""A drafter's config.json is read whole: no key is read past that could change what it does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forms_kit as forms
import pytest
import reference as ref
import torch
from decoding_kit import PROMPT, tiny_target
from safetensors.torch import save_file
from test_eagle3 import drafts_of, published
from torch import Tensor
from transformers import LlamaConfig

from blockpilot.base.errors import UserError
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_load import load_network, new_config
from blockpilot.drafters.eagle3 import Eagle3Drafter, load_head, new_head
from blockpilot.drafters.forms.config import ANY_VALUE, ROPE_KEYS
from blockpilot.drafters.forms.dflash import DFlashConfig
from blockpilot.drafters.forms.eagle3 import Eagle3Config

Raw = dict[str, Any]
KINDS = ("dflash", "eagle3")
TOP = "eagle_aux_hidden_state_layer_ids"
NAMED = {"eagle_config": {TOP: [2, 0, 1]}}  # another order than the usual 1, 1, 0


class Checkpoint:
    """A tiny drafter of one kind in a folder, whose config.json can be written anew."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        config = tiny_target("qwen3").config
        state, _ = ref.random_drafter(config, [0, 2], 2, 5, forms.MASK, seed=1)
        self.state = {name: tensor.contiguous() for name, tensor in state.items()}
        self.raw = forms.shrunk(forms.READ["z-lab"])
        if kind == "eagle3":
            self.state, raw = published("qwen3")
            self.raw = forms.shrunk(forms.EAGLE3, num_hidden_layers=1, draft_vocab_size=31)
            self.raw["rope_theta"] = raw["rope_theta"]
        self.write(self.raw)

    def write(self, raw: Raw, **tensors: Tensor) -> None:
        (self.folder / "config.json").write_text(json.dumps(raw))
        save_file({**self.state, **tensors}, self.folder / "model.safetensors")

    def bound(self, raw: Raw, ignore_keys: Any = ()) -> DFlashDrafter | Eagle3Drafter:
        self.write(raw)
        ignored = list(ignore_keys) if isinstance(ignore_keys, tuple) else ignore_keys
        drafter: Any = DFlashDrafter(checkpoint=str(self.folder), ignore_keys=ignored, head=None)
        if self.kind == "eagle3":
            drafter = Eagle3Drafter(
                checkpoint=str(self.folder), ignore_keys=ignored, depth=1, top_k=1, block_size=4
            )
        drafter.bind(tiny_target("qwen3"))
        return drafter

    def drafts(self, raw: Raw) -> list[float]:
        """What it proposes first behind a prompt, or its logits behind several anchors."""
        if self.kind == "eagle3":
            self.write(raw)
            return drafts_of(self.folder).tolist()
        drafter, target = self.bound(raw), tiny_target("qwen3")
        ids = torch.tensor(PROMPT * 4)
        features = ref.reference_features(target.model, ids.tolist(), drafter.feature_layers)
        anchors = torch.tensor([4, 9, 15])
        blocks: Any = drafter.replay(ids, features, anchors, 5)
        rows = torch.arange(3)
        return [x for slot in range(4) for x in blocks.logits(rows, slot).flatten().tolist()]

    def refused(self, raw: Raw, *told: str, ignore_keys: Any = ()) -> str:
        with pytest.raises(UserError) as caught:
            self.bound(raw, ignore_keys)
        message = str(caught.value)
        assert "\n" not in message
        assert all(part in message for part in (*told, str(self.folder))), message
        return message


@pytest.fixture
def checkpoint(kind: str, tmp_path: Path) -> Checkpoint:
    return Checkpoint(kind, tmp_path)


def parsed(kind: str, raw: Raw) -> DFlashConfig | Eagle3Config:
    """A config of the published sizes, with the shapes of tensors that it is read beside."""
    if kind == "dflash":
        return DFlashConfig.parse(raw, "x")
    width, rows = raw.get("hidden_size", 1), raw.get("draft_vocab_size", 1)
    with torch.device("meta"):
        weights = {"fc.weight": torch.empty(width, 3 * width)}
        weights["lm_head.weight"] = torch.empty(rows, width)
        weights["midlayer.self_attn.q_proj.weight"] = torch.empty(4096, 2 * width)
    return Eagle3Config.parse(raw, weights, "x", 36)


# --- forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", forms.READ)
def test_published_block_drafters_are_read(name: str, tmp_path: Path) -> None:
    raw = forms.READ[name]
    config = parsed("dflash", raw)
    assert isinstance(config, DFlashConfig)
    own = raw["dflash_config"]
    assert list(config.target_layer_ids) == own["target_layer_ids"]
    assert config.block_size == (own.get("block_size") or raw["block_size"])
    checkpoint = Checkpoint("dflash", tmp_path)
    small = forms.shrunk(raw)
    theta = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
    plain = {"rope_theta": theta, "rms_norm_eps": raw["rms_norm_eps"]}
    assert checkpoint.drafts(small) == checkpoint.drafts(checkpoint.raw | plain)


@pytest.mark.parametrize("name", forms.NOT_BUILT)
def test_a_relative_of_dflash_is_refused_by_the_key_that_matters(name: str) -> None:
    raw, key = forms.NOT_BUILT[name]
    with pytest.raises(UserError, match=rf"config\.json says {key}=[^\n]*ignore_keys=\[{key}\b"):
        parsed("dflash", raw)


@pytest.mark.parametrize("name", forms.HEADS_NOT_BUILT)
def test_a_relative_of_eagle3_is_refused_by_the_key_that_matters(name: str) -> None:
    raw, key = forms.HEADS_NOT_BUILT[name]
    with pytest.raises(UserError, match=rf"config\.json says {key}=[^\n]*ignore_keys=\[{key}\b"):
        parsed("eagle3", raw)


def a_target(**config: Any) -> Any:
    """What a new drafter has to know of a target."""
    return SimpleNamespace(name="t", config=LlamaConfig(**config), embedding_scale=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_refused_wherever_it_stands(checkpoint: Checkpoint) -> None:
    chance = random.Random(5)
    places = {"dflash": ["", "dflash_config"], "eagle3": ["", "eagle_config"]}[checkpoint.kind]
    values: list[Any] = [None, True, False, 0, 1.5, "x", [], [3], {}, {"a": 1}]
    for _ in range(40):
        key = "".join(chance.choices("abcdefgh_", k=chance.randint(1, 12)))
        group, value = chance.choice([*places, "rope_parameters"]), chance.choice(values)
        raw = dict(checkpoint.raw)
        raw |= {group: {**raw.get(group, {}), key: value}} if group else {key: value}
        told = f"{group}.{key}" if group else key
        checkpoint.refused(raw, f"config.json says {told}={value}, which is not known here")


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_of_no_effect_has_none(checkpoint: Checkpoint) -> None:
    chance = random.Random(6)
    wanted = checkpoint.drafts(checkpoint.raw)
    assert len(set(wanted)) > 2, "else they could not differ"
    values = [None, True, False, 0, 0.5, "float16", [3], {"a": "b"}]
    for _ in range(4):
        changed = {key: chance.choice(values) for key in ANY_VALUE}
        assert checkpoint.drafts(checkpoint.raw | changed) == wanted, changed


BOTH: dict[str, tuple[Any, Any]] = {  # the value that changes nothing, one that would
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "hidden_act": ("silu", "gelu"),
    "pretraining_tp": (1, 2),
    "is_encoder_decoder": (False, True),
    "partial_rotary_factor": (1.0, 0.5),
    "rope_scaling.partial_rotary_factor": (1.0, 0.25),
}
ONE_VALUE: dict[str, dict[str, tuple[Any, Any]]] = {
    "dflash": {
        **BOTH,
        "dflash_config.causal": (False, True),
        "use_swa": (False, True),
        "swa_window_size": (None, 2048),
        "sample_from_anchor": (False, True),
        "dflash_config.shift_label": (False, True),
        "markov_rank": (0, 256),
    },
    "eagle3": {
        **BOTH,
        "use_sliding_window": (False, True),
        "sliding_window": (None, "4096"),
        "layer_types": (["full_attention"], ["sliding_attention"]),
        "norm_output": ("absent", True),
        "eagle_config.use_aux_hidden_state": (True, False),
    },
}


def with_key(raw: Raw, key: str, value: Any) -> Raw:
    group, _, inner = key.rpartition(".")
    if value == "absent":
        return raw
    return raw | ({group: {**(raw.get(group) or {}), inner: value}} if group else {key: value})


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_built_at_one_value_and_refused_at_others(checkpoint: Checkpoint) -> None:
    wanted = checkpoint.drafts(checkpoint.raw)
    raw = forms.without(checkpoint.raw, "use_sliding_window")
    neutral = raw
    for key, (same, other) in ONE_VALUE[checkpoint.kind].items():
        neutral = with_key(neutral, key, same)
        checkpoint.refused(with_key(raw, key, other), f"config.json says {key}={other}"[:70])
    assert checkpoint.drafts(neutral) == wanted
    unused = {"use_sliding_window": False, "sliding_window": 4096}
    assert checkpoint.drafts(raw | unused) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_places_of_one_key_that_disagree_are_refused(checkpoint: Checkpoint) -> None:
    theta = {"rope_type": "default", "rope_theta": 3.0}
    checkpoint.refused(checkpoint.raw | {"rope_parameters": theta}, "rope_theta=3.0: make them")
    if checkpoint.kind == "dflash":
        own = {"draft_config": {"block_size": 7}}
        checkpoint.refused(checkpoint.raw | own, "draft_config.block_size=7, but block_size=5")


# --- keys that are read past at the user's risk ------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_may_be_ignored_by_name_and_rows_tell(checkpoint: Checkpoint) -> None:
    plain = checkpoint.bound(checkpoint.raw)
    raw = checkpoint.raw | {"fancy": 1, "rope_scaling": {"mode": "x"}}
    message = checkpoint.refused(
        raw, "rope_scaling.mode=x, which", "ignore_keys=[rope_scaling.mode,fancy]"
    )
    assert "also not built: fancy" in message
    checkpoint.refused(raw, "fancy=1", ignore_keys=("rope_scaling.mode",))
    drafter = checkpoint.bound(raw, ("fancy", "rope_scaling.mode"))
    assert drafter.fingerprint is not None
    assert "ignore_keys=fancy+rope_scaling.mode" in drafter.fingerprint
    assert plain.fingerprint is not None
    assert "ignore_keys" not in plain.fingerprint
    checkpoint.refused(raw, "has no key fanzy (drafter.ignore_keys)", ignore_keys=("fanzy",))
    with pytest.raises(UserError, match="ignore_keys=fancy: allowed is a list of keys"):
        checkpoint.bound(raw, "fancy")


def test_the_config_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """The same tensors behind other angles, masks or layers give other drafts."""
    checkpoint = Checkpoint("eagle3", tmp_path)
    raws = [checkpoint.raw, checkpoint.raw | {"rope_theta": 77.0}, checkpoint.raw | NAMED]
    assert len({checkpoint.bound(raw).fingerprint for raw in raws}) == 3
    with pytest.raises(UserError, match="no key x"):
        load_network("random", tiny_target(), ["x"])
    with pytest.raises(UserError, match="no key x"):
        load_head("random", tiny_target(), ["x"])


# --- layers of the target ----------------------------------------------------------------------


def test_a_head_reads_the_layers_that_it_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In either way: nested ids are layers, those at the top what enters the next one."""
    checkpoint = Checkpoint("eagle3", tmp_path)
    usual = checkpoint.drafts(checkpoint.raw)
    assert "names no target layers: it is taken to read 1, 1, 0" in caplog.text
    caplog.clear()
    drafts = {str(usual)}
    for ids in ([2, 0, 1], [0, 1, 2], [2, 2, 2]):
        above = [i + 1 for i in ids]
        nested = checkpoint.raw | {"eagle_config": {TOP: ids, "use_aux_hidden_state": True}}
        for raw in (
            nested,
            checkpoint.raw | {TOP: above},
            checkpoint.raw | {"aux_hidden_state_layer_ids": above},
            nested | {TOP: above},
        ):
            drafter = checkpoint.bound(raw)
            assert drafter.feature_layers == tuple(ids)
            found = checkpoint.drafts(raw)
        drafts.add(str(found))
    assert len(drafts) == 4, "else the layers are not what it reads"
    assert "names no target layers" not in caplog.text


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (NAMED | {TOP: [2, 0, 1]}, "0 is the embeddings, not built"),
        (NAMED | {TOP: [1, 2, 3]}, f"{TOP} means layers [0, 1, 2]: make them agree"),
        ({TOP: [1, 2]}, "fc reads 96 features, 2 target layers [0, 1] have 2 x 32"),
        ({TOP: [1, 2, 4]}, "[0, 1, 3] hold the last one, which the published drafters read after"),
        ({TOP: [1, 2, 9]}, "[0, 1, 8] out of range, allowed are 0..2"),
        ({TOP: [1, 2, "3"]}, "must be a list of integers"),
        ({TOP: []}, "must be a list of integers"),
    ],
)
def test_layers_that_a_head_cannot_read_are_refused(keys: Raw, told: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint("eagle3", tmp_path)
    checkpoint.refused(checkpoint.raw | keys, told)


def test_a_head_may_read_another_number_of_layers(tmp_path: Path) -> None:
    checkpoint = Checkpoint("eagle3", tmp_path)
    checkpoint.state["fc.weight"] = checkpoint.state["fc.weight"][:, :64].contiguous()
    drafter = checkpoint.bound(checkpoint.raw | {TOP: [1, 3]})
    assert drafter.feature_layers == (0, 2)
    checkpoint.refused(checkpoint.raw, "fc reads 64 features, 3 target layers [1, 1, 0]")


def test_written_heads_name_their_layers_for_every_reader() -> None:
    written = new_head(tiny_target(), torch.arange(9)).config.published()
    for raw, ids in ((written, [1, 1, 0]), (forms.shipped("smollm2-135m-eagle3"), [1, 14, 26])):
        assert raw["eagle_config"] == {"use_aux_hidden_state": True, TOP: ids}
        assert raw[TOP] == [i + 1 for i in ids]


@pytest.mark.parametrize(("depth", "ids"), [(2, (0,)), (3, (1,)), (4, (2,))])
def test_a_new_drafter_of_a_shallow_target_never_reads_the_last_layer(
    depth: int, ids: tuple[int, ...]
) -> None:
    sizes = {"n_layers": 1, "n_target_layers": 1, "block_size": 4, "mask_token_id": 0}
    target: Any = a_target(num_hidden_layers=depth)
    assert new_config(target, **sizes).target_layer_ids == ids
    target.config.num_hidden_layers = 1
    with pytest.raises(UserError, match="reads layers before the last one; t has only 1 layer"):
        new_config(target, **sizes)


# --- rotary angles -----------------------------------------------------------------------------

SCALED: Raw = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("kind", KINDS)
def test_angles_do_not_depend_on_the_length(checkpoint: Checkpoint) -> None:
    """A draft's keys are turned once for the whole capacity, a replay's for what there is."""
    seen = []
    for rope_type in ROPE_KEYS:
        keys = {key: SCALED[key] for key in ROPE_KEYS[rope_type] if key in SCALED}
        raw = checkpoint.raw | {"max_position_embeddings": 256}
        raw |= {"rope_scaling": {"rope_type": rope_type, **keys}}
        network = checkpoint.bound(raw).network
        assert network is not None
        short, long = (network.rope(torch.arange(n), torch.float64)[0] for n in (40, 5000))
        assert torch.equal(short, long[:40])
        seen.append(long.sum().item())
    assert len(set(seen)) == len(ROPE_KEYS), "each kind turns by angles of its own"
    for rope_type in ("dynamic", "longrope", "proportional", ["x"]):
        for key in ("rope_type", "type"):
            scaling = {"rope_scaling": {key: rope_type, "factor": 2.0}}
            told = f"config.json says rope_scaling.{key}={rope_type}, allowed is default or linear"
            checkpoint.refused(checkpoint.raw | scaling, told)
    for factor in (None, "x", 0, float("inf")):
        linear = {"rope_scaling": {"rope_type": "linear", "factor": factor}}
        checkpoint.refused(checkpoint.raw | linear, "factor")


def test_a_new_drafter_has_angles_that_do_not_depend_on_the_length() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e4}
    target: Any = a_target(rope_parameters=dynamic)
    sizes = {"n_layers": 1, "n_target_layers": 1, "block_size": 4, "mask_token_id": 0}
    rope = new_config(target, **sizes).layers.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 5e4}


# --- tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(checkpoint: Checkpoint, value: float) -> None:
    checkpoint.state["norm.weight"] = checkpoint.state["norm.weight"].clone()
    checkpoint.state["norm.weight"][3] = value
    checkpoint.refused(checkpoint.raw, "tensor norm.weight holds values that are not finite")
