"""Drafters made and run by the packages that define their forms (scripts/form_fixtures.py) load
here, and give the same states, logits and drafts.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot.decoding.target import LogitShape
from blockpilot.decoding.types import Draft, Forward, View
from blockpilot.drafters.__main__ import described
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.eagle3 import Eagle3Drafter

FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
HEADS = [name for name in FOLDERS if "eagle3" in name]
BLOCKS = [name for name in FOLDERS if name not in HEADS]


def fixture(name: str) -> dict[str, Tensor]:
    """What the package made, and what of."""
    return load_file(FIXTURES / "target.safetensors") | load_file(FIXTURES / f"{name}.safetensors")


class PublishedTarget:
    """The target that a fixture was made for: its embedding and LM head, without layers."""

    name, engine, timed, fingerprint = "published", "eager", False, "published"
    device, dtype, embedding_scale = torch.device("cpu"), torch.float32, 1.0

    def __init__(self, known: dict[str, Tensor]) -> None:
        self.rows, self.head = known["embedding"], known["head"]
        self.embed_rows = len(self.rows)
        size, width = self.rows.shape
        self.config = SimpleNamespace(vocab_size=size, hidden_size=width, num_hidden_layers=6)

    def embed(self, ids: Tensor) -> Tensor:
        return self.rows[ids]

    def logits(self, hidden: Tensor, shape: LogitShape | None = None) -> Tensor:
        return (shape or LogitShape())(hidden @ self.head.T)


def drafted(
    folder: Path, known: dict[str, Tensor], features: Tensor | None = None
) -> tuple[Draft, Tensor]:
    """What the checkpoint in a folder proposes behind a fixture's features, or others, and the
    states [S, D] of the drafting slots."""
    drafter: Any = DFlashDrafter(checkpoint=str(folder), ignore_keys=[], head=None)
    target: Any = PublishedTarget(known)
    drafter.bind(target)
    features = known["features"] if features is None else features
    nothing = Forward(torch.empty(0), None, torch.empty(0))
    start = len(features)
    view = View(torch.zeros(start, dtype=torch.int64), known["anchor"], start, features, nothing)
    drafter.start(view, start + 20)
    block = drafter._blocks(known["anchor"], drafter.trained_block_size)[0]
    return drafter.draft(view, drafter.trained_block_size), drafter._block(block)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_packages_drafter_drafts_the_same_here(name: str) -> None:
    known = fixture(name)
    draft, states = drafted(FIXTURES / name, known)
    torch.testing.assert_close(states, known["hidden"], atol=1e-5, rtol=1e-5)
    assert draft.logits is not None
    assert draft.tokens.tolist() == known["drafts"].tolist()
    rows = known["logits"].shape[-1]
    found = draft.logits
    if rows < found.shape[-1]:  # of the drafter's own vocabulary
        found = found[:, found[0] > torch.finfo(found.dtype).min]
    torch.testing.assert_close(found, known["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_another_tap_or_place_would_show(name: str) -> None:
    """The same weights behind features of other layers, or of positions one off."""
    known = fixture(name)
    width = known["features"].shape[1] // 2
    right = drafted(FIXTURES / name, known)[0].logits
    for features in (
        known["features"].roll(width, dims=1),
        known["features"].roll(1, dims=0),
        known["features"][1:],
    ):
        found = drafted(FIXTURES / name, known, features)[0].logits
        assert found is not None
        assert right is not None
        assert (found - right).abs().max() > 1e-2


def test_a_slot_that_fills_is_not_one_that_shifts(tmp_path: Path) -> None:
    """The keys that tell the two apart decide the drafts."""
    for name, key, value in (
        ("speculators-dflash-shifting", "sample_from_anchor", False),
        ("speculators-dspark", "sample_from_anchor", False),
        ("specforge-domino", "shift_label", False),
    ):
        known = fixture(name)
        raw = json.loads((FIXTURES / name / "config.json").read_text())
        (raw["dflash_config"] if name.startswith("specforge") else raw)[key] = value
        (tmp_path / "config.json").write_text(json.dumps(raw))
        save_file(load_file(FIXTURES / name / "model.safetensors"), tmp_path / "model.safetensors")
        drafter: Any = DFlashDrafter(checkpoint=str(tmp_path), ignore_keys=[], head=None)
        target: Any = PublishedTarget(known)
        drafter.bind(target)
        assert drafter.trained_block_size == 5
        assert drafter.network.first == 1


def rewritten(name: str, folder: Path, keys: dict[str, Any], **tensors: Tensor) -> Path:
    """A fixture's weights and further ones behind another config.json."""
    (folder / "config.json").write_text(json.dumps(keys))
    weights = load_file(FIXTURES / name / "model.safetensors")
    save_file({**weights, **tensors}, folder / "model.safetensors")
    return folder


def test_jetspecs_key_means_what_is_causal_means(tmp_path: Path) -> None:
    name = "dflash-causal-whole"
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    del raw["is_causal"]
    raw["dflash_config"]["causal_head"] = True
    known = fixture(name)
    draft, states = drafted(rewritten(name, tmp_path, raw), known)
    torch.testing.assert_close(states, known["hidden"], atol=1e-5, rtol=1e-5)
    assert draft.tokens.tolist() == known["drafts"].tolist()


@pytest.mark.parametrize("kind", ["", "-gated", "-rnn"])
def test_deepspecs_flat_keys_mean_specforges_nested_ones(kind: str, tmp_path: Path) -> None:
    """With an embedding and a head of its own, whatever the target's are."""
    name = f"specforge-dspark{kind}"
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    own = raw.pop("dflash_config")
    del own["projector_type"]
    flat = raw | {"markov_head_type": "vanilla"} | own | {"architectures": ["Qwen3DSparkModel"]}
    known = fixture(name)
    rows = {"embed_tokens.weight": known["embedding"], "lm_head.weight": known["head"]}
    folder = rewritten(name, tmp_path, flat, **rows)
    other = known | {"embedding": known["head"], "head": known["embedding"]}
    draft, states = drafted(folder, other)
    torch.testing.assert_close(states, known["hidden"], atol=1e-5, rtol=1e-5)
    assert draft.tokens.tolist() == known["drafts"].tolist()
    torch.testing.assert_close(draft.logits, known["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_checkpoint_is_described(name: str) -> None:
    facts = dict(described(str(FIXTURES / name)))
    assert facts["reads layers"] == "1, 3"
    assert facts["form"].startswith(
        {"dflash": ("z-lab", "DFlash2"), "specforge": ("Domino", "SpecForge")}.get(
            name.split("-")[0], ("speculators",)
        )
    )
    assert ("every slot drafts" in facts["block"]) == (len(fixture(name)["drafts"]) == 5)


def chain_of(folder: Path, known: dict[str, Tensor], **changed: Tensor) -> tuple[Tensor, Tensor]:
    """The first logits [K] and the chain [4] of an EAGLE-3 head behind a fixture's context."""
    drafter: Any = Eagle3Drafter(
        checkpoint=str(folder), ignore_keys=[], depth=3, top_k=1, block_size=5
    )
    target: Any = PublishedTarget(known)
    drafter.bind(target)
    given = known | changed
    nothing = Forward(torch.empty(0), None, torch.empty(0))
    start = len(given["features"])
    view = View(given["context"], known["anchor"], start, given["features"], nothing)
    drafter.start(view, start + 20)
    first = drafter.network.logits(drafter._last)[0]
    return first, drafter.draft(view, 5).tokens


@pytest.mark.parametrize("name", HEADS)
def test_a_packages_head_drafts_the_same_here(name: str) -> None:
    known = fixture(name)
    logits, tokens = chain_of(FIXTURES / name, known)
    assert tokens.tolist() == known["drafts"].tolist()
    torch.testing.assert_close(logits, known["logits"][0], atol=1e-5, rtol=1e-5)
    width = known["features"].shape[1] // 2
    for changed in (
        {"features": known["features"].roll(width, dims=1)},  # another order of taps
        {"context": known["context"].roll(1)},  # tokens one off
    ):
        found, _ = chain_of(FIXTURES / name, known, **changed)
        assert (found - logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("speculators-eagle3-normed", "norm_before_residual"),
        ("speculators-eagle3-deep", "norm_output"),
    ],
)
def test_a_norm_without_weights_of_its_own_counts(name: str, key: str, tmp_path: Path) -> None:
    known = fixture(name)
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    assert raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: False}))
    save_file(load_file(FIXTURES / name / "model.safetensors"), tmp_path / "model.safetensors")
    _, tokens = chain_of(tmp_path, known)
    assert tokens.tolist() != known["drafts"].tolist()
