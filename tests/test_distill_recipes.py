"""Recipes: a new kind of drafter is trained as it stands, and each kind has its own keys only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from stages_kit import composed, distill_arguments, distill_prompts, entered, performed
from torch import Tensor, nn

from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method
from blockpilot.decoding.replay import slot_labels
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Draft, View
from blockpilot.distill import __main__ as distill
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.losses import Candidates
from blockpilot.distill.recipe import Blueprint, walked_tau
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.fixed import FixedPolicy


class BigramDrafter(NoDrafter):
    """Drafts the next token from the last one alone."""

    name = "bigram"

    def __init__(self, *, checkpoint: str) -> None:
        weights = load_file(Path(checkpoint) / "model.safetensors")
        self.table = weights["1.weight"] @ weights["0.weight"].T  # [V, V]

    def draft(self, view: View, n_slots: int) -> Draft:
        tokens = [view.anchor]
        for _ in range(n_slots - 1):
            tokens.append(self.table[:, tokens[-1]].argmax(dim=0))
        return Draft(torch.cat(tokens[1:]))


class BigramStudent:
    """Embedding and output matrix of a table of next tokens."""

    def __init__(self, target: Target, width: int, block_size: int) -> None:
        rows = target.embed_rows
        self.network: nn.Module = nn.Sequential(
            nn.Embedding(rows, width), nn.Linear(width, rows, bias=False)
        )
        self.block_size = block_size

    def published(self) -> dict[str, Any]:
        return {"architectures": ["Bigram"]}

    def compile(self, backend: str) -> None:
        self.network.compile(backend=backend)

    def candidates(self, generator: torch.Generator) -> Candidates:
        nothing = torch.empty(0)
        return Candidates(nothing, nothing, nothing, None)

    def loss(
        self, model: nn.Module, autocast: Any, example: Example, candidates: Any, generator: Any
    ) -> Tensor:
        response = example.ids[example.prompt_length :]
        return F.cross_entropy(model(response[:-1]), response[1:])

    @torch.no_grad()
    def tau(self, example: Example) -> float:
        anchors = torch.arange(example.prompt_length, len(example.ids) - 1)
        labels, known = slot_labels(example.ids, anchors, self.block_size)
        drafted = [example.ids[anchors]]
        for _ in range(self.block_size - 1):
            drafted.append(self.network(drafted[-1]).argmax(dim=-1))
        return walked_tau(torch.stack(drafted[1:], dim=1), labels, known)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        save_file(self.network.state_dict(), folder / "model.safetensors")

    def method(self, folder: Path) -> Method:
        policy = FixedPolicy(block_size=self.block_size, block_mode="draft")
        return Method(BigramDrafter(checkpoint=str(folder)), policy)


@dataclass(frozen=True, kw_only=True)
class BigramRecipe:
    """A third kind, which reads no feature of its target."""

    name: ClassVar[str] = "bigram"
    description: ClassVar[str] = "Bigrams of {repo}."
    n_target_layers: ClassVar[int] = 0

    width: int

    def blueprint(self, target: Target, name: str, block_size: int, training: Any) -> Blueprint:
        return Blueprint((), lambda corpus: BigramStudent(target, self.width, block_size))


def test_a_new_kind_is_a_class_and_a_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the stage knows it, not even that there could be features to read."""
    files = {
        "drafter": f"_target_: {__name__}.BigramDrafter\n",
        "recipe": f"_target_: {__name__}.BigramRecipe\nwidth: 16\n",
    }
    for group, text in files.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "bigram.yaml").write_text(text)
    arguments = distill_arguments(
        tmp_path,
        distill_prompts(tmp_path),
        f"hydra.searchpath=[file://{tmp_path}]",
        "new_drafter.name=null",
        "new_drafter.block_size=3",
        "training.steps=30",
        "training.evaluate_every=30",
        recipe="bigram",
    )
    performed(distill.run, "distill", *arguments, "plan=true")
    assert "response tokens, at most" in capsys.readouterr().out
    folder = performed(distill.run, "distill", *arguments)
    assert folder.name == "smollm2-135m-bigram-b3"
    card = (folder / "README.md").read_text()
    assert "Bigrams of " in card
    assert "width: 16" in card
    corpus = Corpus(sorted((folder.parent / "responses/distill/local").glob("*.parquet")))
    assert corpus[0].features is None, "nothing was stored that it does not read"
    with pytest.raises(UserError, match=r"made with recipe.width=16, this run has 8"):
        performed(distill.run, "distill", *arguments, "recipe.width=8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafter=eagle3", "recipe.gamma=2"], "unknown key recipe.gamma"),
        (["drafter=eagle3", "+recipe.gamma=2"], "unexpected keyword argument 'gamma'"),
        (["drafter=dflash", "recipe.draft_vocabulary=9"], "unknown key recipe.draft_vocabulary"),
        (["drafter=eagle3", "drafter.block_size=6"], "unknown key drafter.block_size"),
        (["drafter=eagle3", "recipe.draft_vocabulary=9.5"], "must be a whole number >= 1"),
        (["recipe.gamma=0"], "recipe.gamma=0: must be a number > 0"),
        (["drafter=prompt_lookup"], "Available options in 'recipe': dflash, eagle3"),
    ],
)
def test_what_the_kind_does_not_use_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert entered(monkeypatch, distill.main, *arguments, "run_id=run", "plan=true") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("blockpilot.distill: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ("drafter=eagle3", "Eagle3Recipe"),
        ("drafter=specblock", "SpecBlockRecipe"),
        ("experiment=local_drafter", "DFlashRecipe"),
        ("experiment=local_eagle3", "Eagle3Recipe"),
        ("experiment=local_specblock", "SpecBlockRecipe"),
    ],
)
def test_the_drafter_chooses_its_recipe(choice: str, kind: str) -> None:
    cfg = composed("distill", "run_id=run", choice)
    assert cfg.recipe["_target_"].rpartition(".")[2] == kind
    assert cfg.drafter is None
