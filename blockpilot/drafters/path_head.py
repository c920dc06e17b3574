"""Path heads: what the token before adds to the logits of a block drafter's slot.

The slots of a block are drafted at once and do not see each other's choices. A head scores the
best tokens of a slot again, behind the token that was chosen before it: DFlash2's selector
(z-lab/dflash), which also reads the slot's state, and DSpark's Markov head (arXiv 2607.05147). Both
are of first order in the path, so one product gives the scores of all pairs of a block. Config keys
and tensor names are the published ones, but a head's files hold no drafter.

Letters: S slots of a block, D width, V vocabulary, r rank, K best tokens of a slot, J tokens before
it.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockpilot.base.errors import UserError
from blockpilot.base.provenance import digest
from blockpilot.decoding.paths import before_each
from blockpilot.decoding.protocols import TargetModel
from blockpilot.drafters.forms.checkpoints import fill_network, read_checkpoint, save_checkpoint
from blockpilot.drafters.forms.config import ConfigReader

TOP_K = 16  # best tokens of a slot that a head scores, as in the published selectors


@dataclass(frozen=True)
class PathHeadConfig:
    """Shape of a head and which drafter it was trained on."""

    kind: str
    rank: int
    hidden_size: int
    vocab_size: int
    top_k: int
    drafter: str | None  # digest of its weights
    skips_first: bool = False  # the drafter knows the anchor, so the first slot stays as it is

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> PathHeadConfig:
        """From a config.json (UserError with the key that is missing, wrong or not built)."""
        reader = ConfigReader(raw, where)
        selector = reader.take("dflash_config.selector_rank", "selector_rank")
        markov = reader.take("dflash_config.markov_rank", "markov_rank")
        reader.expect(("dflash_config.markov_head_type", "markov_head_type"), "vanilla")
        if (selector is None) == (markov is None):
            reader.refuse("config.json holds selector_rank or markov_rank, one of the two")
        found = {
            "rank": selector if markov is None else markov,
            "hidden_size": reader.take("hidden_size"),
            "vocab_size": reader.take("vocab_size"),
            "top_k": reader.take("dflash_config.selector_top_k", "selector_top_k") or TOP_K,
        }
        drafter = reader.take("drafter_digest")
        skips = reader.take("skips_first_slot") or False
        reader.refuse_unread()
        reader.whole(found, found, least=1)
        if not isinstance(skips, bool):
            reader.refuse(f"skips_first_slot={skips}: allowed are true and false")
        kind = "selector" if markov is None else "markov"
        return cls(kind, drafter=drafter, skips_first=skips, **found)

    def published(self) -> dict[str, Any]:
        """The config.json of the head, with the published keys."""
        own: dict[str, Any]
        if self.kind == "selector":
            own = {"dflash_config": {"selector_rank": self.rank, "selector_top_k": self.top_k}}
        else:
            own = {"markov_rank": self.rank, "markov_head_type": "vanilla"}
        shape = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
        return {
            **shape,
            **own,
            "skips_first_slot": self.skips_first,
            "drafter_digest": self.drafter,
            "dtype": "bfloat16",
        }


class PathHead(nn.Module):
    """A head of either kind."""

    config: PathHeadConfig

    @abstractmethod
    def forward(self, hidden: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        """What the logits of `tokens` [..., K] gain behind each of `before` [..., J]: [..., J, K].

        `hidden` [..., D] are the slots' states as the LM head reads them.
        """

    def of_block(self, hidden: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        """The same of blocks, [..., S, K, K]: their slots' states [..., S, D], the anchors' tokens
        [...] and the slots' best tokens [..., S, K], before which those of the slot before stand.
        """
        bias: Tensor = self(hidden, before_each(anchors, tokens), tokens)
        if self.config.skips_first:
            bias[..., 0, :, :] = 0
        return bias


class Selector(nn.Module):
    """Tensors of DFlash2's selector."""

    def __init__(self, config: PathHeadConfig) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)
        shape = config.vocab_size, config.rank
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))


class SelectorHead(PathHead):
    """DFlash2: sum_r A[before]_r (W h)_r E[token]_r (z-lab/dflash, `candidate_selector`)."""

    def __init__(self, config: PathHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.candidate_selector = Selector(config)

    def forward(self, hidden: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        own = self.candidate_selector
        seen = own.predecessor_codebook[before] * own.hidden_projection(hidden)[..., None, :]
        return seen @ own.successor_codebook[tokens].transpose(-1, -2)


class MarkovTables(nn.Module):
    """Tensors of DSpark's vanilla Markov head."""

    def __init__(self, config: PathHeadConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, config.vocab_size, bias=False)


class MarkovHead(PathHead):
    """DSpark, vanilla: W2[token] . W1[before] (arXiv 2607.05147); blind to the slot's state."""

    def __init__(self, config: PathHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.markov_head = MarkovTables(config)

    def forward(self, hidden: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        own = self.markov_head
        return own.markov_w1(before) @ own.markov_w2.weight[tokens].transpose(-1, -2)


def new_path_head(config: PathHeadConfig) -> PathHead:
    """A head that adds nothing yet, or next to it."""
    return SelectorHead(config) if config.kind == "selector" else MarkovHead(config)


def load_path_head(place: str, target: TargetModel, network: nn.Module) -> PathHead:
    """The head in a folder or hub repository, `bundled:<name>` or `random`, in float32.

    Raises UserError when it is missing, incomplete, or of another target or drafter.
    """
    if place == "random":
        return random_path_head(target)
    raw, weights = read_checkpoint(place)
    config = PathHeadConfig.parse(raw, place)
    for key, found, wanted in (
        ("hidden_size", config.hidden_size, target.config.hidden_size),
        ("vocab_size", config.vocab_size, target.config.vocab_size),
    ):
        if found != wanted:
            raise UserError(f"drafter.head={place}: {key}={found}, the target has {wanted}")
    if config.drafter is not None and config.drafter != (own := drafter_digest(network)):
        raise UserError(
            f"drafter.head={place}: it was trained on the drafter with digest {config.drafter}, "
            f"this one has {own}"
        )
    head = new_path_head(config)
    fill_network(head, weights, place)
    return head


def random_path_head(target: TargetModel) -> PathHead:
    """A selector with random weights, for offline tests and cost curves."""
    shape: Any = target.config
    config = PathHeadConfig("selector", 48, shape.hidden_size, shape.vocab_size, TOP_K, None)
    head = SelectorHead(config)
    draw = torch.Generator().manual_seed(0)
    for table in head.parameters():
        scale = config.rank**-0.25 if len(table) == shape.vocab_size else shape.hidden_size**-0.5
        table.data.copy_(scale * torch.randn(table.shape, generator=draw))
    return head


def drafter_digest(network: nn.Module) -> str:
    """Twelve hex digits of a drafter's weights, whatever the dtype that it was cast to."""
    return digest(copy.deepcopy(network).float())


def save_path_head(head: PathHead, folder: Path) -> None:
    """Write config.json and bf16 safetensors under the published names."""
    save_checkpoint(head, head.config.published(), folder)
