"""Checkpoints of DFlash drafters: the published forms load, all others are refused by name."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference as ref
import torch
from decoding_kit import PROMPT, VOCAB, plain, sampler, tiny_target
from safetensors.torch import save_file
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method, decode
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.policies.fixed import FixedPolicy

PACKAGE = Path(__file__).parents[1] / "blockpilot"
MASK = VOCAB - 1
CONFIG_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rope_theta",
    "num_target_layers",
    "block_size",
)


def published(kind: str = "qwen3", **target: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Random weights in bf16 and their config.json, as published."""
    config = tiny_target(kind, **target).config
    state, raw = ref.random_drafter(config, [0, 2], 2, 5, MASK, seed=1)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}, raw


def write(folder: Path, state: dict[str, Tensor], raw: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(state, folder / "model.safetensors")
    return folder


def refused(folder: Path, *told: str, **target: Any) -> str:
    """The one-line message of a checkpoint that `bind` refuses."""
    with pytest.raises(UserError) as caught:
        DFlashDrafter(checkpoint=str(folder), ignore_keys=[], head=None).bind(
            tiny_target("qwen3", **target)
        )
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(folder), *told):
        assert part in message
    return message


# --- forms of the config -----------------------------------------------------------------------


def nested(raw: dict[str, Any]) -> dict[str, Any]:
    return raw


def older(raw: dict[str, Any]) -> dict[str, Any]:
    return {"draft_config" if k == "dflash_config" else k: v for k, v in raw.items()}


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in raw.items() if k != "dflash_config"}
    return rest | raw["dflash_config"]


def rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """The form that transformers 5 writes."""
    rest = {k: v for k, v in raw.items() if k != "rope_theta"}
    return rest | {"rope_parameters": {"rope_type": "default", "rope_theta": raw["rope_theta"]}}


FORMS = (nested, older, flat, rope_parameters)


@pytest.mark.parametrize("form", FORMS)
def test_every_published_form_loads_alike(
    form: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    state, raw = published()
    target = tiny_target("qwen3")
    drafter = DFlashDrafter(
        checkpoint=str(write(tmp_path, state, form(raw))), ignore_keys=[], head=None
    )
    drafter.bind(target)
    assert drafter.trained_block_size == 5
    assert drafter.feature_layers == (0, 2)
    assert drafter.network is not None
    assert drafter.network.config.mask_token_id == MASK
    method = Method(drafter, FixedPolicy(block_size=5, block_mode="draft"))
    method.bind(target)
    trace = decode(target, method, PROMPT, sampler(), 12)
    tokens, committed = ref.reference_dflash_decode(
        target.model,
        state,
        raw,
        PROMPT,
        12,
        (),
        lambda logits, position: ref.lowest_argmax(logits),
        5,
        "draft",
    )
    assert (trace.tokens, trace.committed) == (tokens, committed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", [*CONFIG_KEYS, "mask_token_id", "target_layer_ids"])
def test_a_missing_key_is_named(
    key: str, form: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    state, raw = published()
    if key in raw:
        raw.pop(key)
    raw["dflash_config"].pop(key, None)
    if key == "rope_theta" and form is rope_parameters:
        raw["rope_theta"] = None
    refused(write(tmp_path, state, form(raw)), f"lacks the key {key}")


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([0, 4], "[0, 4] out of range, allowed are 0..2"),
        ([-1, 2], "[-1, 2] out of range, allowed are 0..2"),
        ([0, 3], "[0, 3] hold the last one, which"),
        ([2, 0], "target_layer_ids=[2, 0] must be increasing"),
        ([2, 2], "target_layer_ids=[2, 2] must be increasing"),
        ([], "target_layer_ids=[] must be a list"),
    ],
)
def test_layer_ids_are_in_range_and_increasing(ids: list[int], told: str, tmp_path: Path) -> None:
    state, raw = published()
    raw["dflash_config"]["target_layer_ids"] = ids
    refused(write(tmp_path, state, raw), told)


def test_fc_is_as_wide_as_the_layers_it_reads(tmp_path: Path) -> None:
    state, raw = published()
    raw["dflash_config"]["target_layer_ids"] = [0, 1, 2]
    refused(write(tmp_path, state, raw), "fc.weight", "[32, 64]", "[32, 96]")


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_trained_block_has_a_slot_to_draft(size: int, tmp_path: Path) -> None:
    state, raw = published()
    refused(write(tmp_path, state, raw | {"block_size": size}), f"block_size={size}")


@pytest.mark.parametrize("key", ["hidden_size", "block_size", "mask_token_id", "target_layer_ids"])
@pytest.mark.parametrize("value", ["x", {"a": 1}, 1.5])
def test_a_value_of_another_type_is_named(key: str, value: Any, tmp_path: Path) -> None:
    state, raw = published()
    refused(write(tmp_path, state, flat(raw) | {key: value}), key)


# --- tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    state, raw = published()
    state.pop(name)
    refused(write(tmp_path, state, raw), f"tensor {name} is missing")


@pytest.mark.parametrize("name", ["lm_head.weight", "layers.2.mlp.up_proj.weight", "d2t"])
def test_an_unknown_tensor_is_named(name: str, tmp_path: Path) -> None:
    """A drafter with a head of its own, with a layer too many, or of another kind."""
    state, raw = published()
    state[name] = torch.zeros(2)
    refused(write(tmp_path, state, raw), f"unknown tensor {name}")


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    state, raw = published()
    name = "layers.0.mlp.up_proj.weight"
    state[name] = state[name][:7].clone()
    refused(write(tmp_path, state, raw), name, "[7, 32]", "[48, 32]")


# --- drafter of another target -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "theirs"),
    [("num_target_layers", 36, 4), ("hidden_size", 64, 32), ("vocab_size", 999, VOCAB)],
)
def test_a_drafter_of_another_target_is_refused(
    key: str, value: int, theirs: int, tmp_path: Path
) -> None:
    state, raw = published()
    told = (f"{key}={value}, the target has {theirs}", "another target")
    refused(write(tmp_path, state, raw | {key: value}), *told)


def test_a_padded_vocabulary_is_another_vocabulary(tmp_path: Path) -> None:
    folder = write(tmp_path, *published(padded_rows=7))
    DFlashDrafter(checkpoint=str(folder), ignore_keys=[], head=None).bind(
        tiny_target("qwen3", padded_rows=7)
    )
    refused(folder, f"vocab_size={VOCAB + 7}")


@pytest.mark.parametrize("tied", [True, False])
def test_the_mask_may_lie_past_the_tokenizer_but_not_past_the_rows(
    tied: bool, tmp_path: Path
) -> None:
    state, raw = published(tied=tied, padded_rows=7)
    target = tiny_target("qwen3", tied=tied, padded_rows=7)
    raw["dflash_config"]["mask_token_id"] = VOCAB + 6
    drafter = DFlashDrafter(checkpoint=str(write(tmp_path, state, raw)), ignore_keys=[], head=None)
    method = Method(drafter, FixedPolicy(block_size=5, block_mode="draft"))
    method.bind(target)
    tokens = decode(target, method, PROMPT, sampler(1.0), 12).tokens
    assert tokens == plain(target, 12, sampler(1.0)).tokens
    for mask in (VOCAB + 7, -1):
        raw["dflash_config"]["mask_token_id"] = mask
        told = (f"mask_token_id={mask}", f"0..{VOCAB + 6}")
        refused(write(tmp_path, state, raw), *told, tied=tied, padded_rows=7)


# --- files -------------------------------------------------------------------------------------


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, *published())
    (folder / "config.json").unlink()
    refused(folder, "cannot read", "config.json")


@pytest.mark.parametrize("text", ["{", "[]", "3", "\udcff"])
def test_a_broken_config_is_refused(text: str, tmp_path: Path) -> None:
    folder = write(tmp_path, *published())
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(folder, "cannot read")


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, *published())
    file = folder / "model.safetensors"
    for content in (file.read_bytes()[:1000], b"", b"\0" * 64):
        file.write_bytes(content)
        refused(folder, "cannot read")


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, *published())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "is missing")


def test_several_files_of_weights_are_one_checkpoint(tmp_path: Path) -> None:
    state, raw = published()
    folder = write(tmp_path, {"fc.weight": state.pop("fc.weight")}, raw)
    save_file(state, folder / "model-2.safetensors")
    DFlashDrafter(checkpoint=str(folder), ignore_keys=[], head=None).bind(tiny_target("qwen3"))


@pytest.mark.parametrize(
    "error", [OSError("offline: no connection\nsecond line"), ValueError("bad repo id")]
)
def test_a_hub_out_of_reach_is_told_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr("blockpilot.base.hub.snapshot_download", unreachable)
    first_line = str(error).splitlines()[0]
    refused(Path("z-lab/nowhere"), "neither a folder nor reachable", first_line, "local folder")


def test_the_hub_is_asked_for_safetensors_and_config_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write(tmp_path, *published())
    asked: list[tuple[object, object]] = []

    def download(repo: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(folder)

    monkeypatch.setattr("blockpilot.base.hub.snapshot_download", download)
    DFlashDrafter(checkpoint="z-lab/some", ignore_keys=[], head=None).bind(tiny_target("qwen3"))
    assert asked == [("z-lab/some", ["config.json", "*.safetensors"])]


def test_an_unknown_bundled_drafter_is_refused() -> None:
    refused(Path("bundled:nothing"), "not shipped; shipped are")


def test_nothing_runs_code_of_a_checkpoint() -> None:
    """Of a pickle tensors alone are read, and there is no remote code anywhere."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.keyword):
                assert node.arg != "trust_remote_code", where
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.load"):
                safe = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert safe.get("weights_only") == "True", where
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "joblib", "dill"}, where
