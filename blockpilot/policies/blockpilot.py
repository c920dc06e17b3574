"""BlockPilot (arXiv 2606.31315): one block size per prompt, predicted from the target's prefill."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.base.hub import folder_of
from blockpilot.base.provenance import digest
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.types import Block, Draft, Verdict, View
from blockpilot.predictor.net import (
    BlockSizeNet,
    PredictorConfig,
    features_of,
    load_predictor,
    save_predictor,
)

log = logging.getLogger(__name__)

_RADIUS = 2  # of the untrained predictor


class BlockSizePolicy:
    """Asks a trained predictor once per prompt, inside the timed region.

    `path` is a folder or hub repository that `python -m blockpilot.train` wrote, or `random` for an
    untrained predictor over B-2..B+2 (offline tests).
    """

    name = "blockpilot"
    candidates = 0
    reads_clock = False
    tree = False
    net: BlockSizeNet  # once loaded
    blocks: list[Block]  # one a size, once bound

    def __init__(self, *, path: str) -> None:
        self.path = path
        self.block_size: int | None = None
        self.fingerprint: str | None = None
        self.speculates = True
        self.block_mode = "draft"

    @classmethod
    def from_pretrained(cls, path: str) -> Self:
        """The policy of a folder or repository, its predictor loaded."""
        policy = cls(path=path)
        policy.net = load_predictor(folder_of(f"policy {path}", path))
        return policy

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a bound or loaded policy's predictor."""
        save_predictor(self.net, Path(folder))

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        """Load the predictor; refuse one of another target, vocabulary or drafter (UserError)."""
        if drafter.trained_block_size is None:
            raise UserError(f"policy {self.name}: drafter {drafter.name} has no block to size")
        if self.path == "random":
            self.net = _random(target, drafter)
        elif not hasattr(self, "net"):
            self.net = load_predictor(folder_of(f"policy {self.path}", self.path))
        config = self.net.config
        dtype = str(target.dtype).removeprefix("torch.")
        if config.dtype != dtype:
            log.warning(
                "policy %s: trained in %s, this is %s: the target is known by its name alone",
                self.path,
                config.dtype,
                dtype,
            )
        same_dtype = config.dtype == dtype
        for what, trained_for, current in (
            ("target", config.target, target.name),
            *([("target weights", config.target_fingerprint, target.fingerprint)] * same_dtype),
            ("vocabulary", config.vocab_size, target.embed_rows),
            ("hidden_size", config.hidden_size, target.config.hidden_size),
            ("drafter", config.drafter, drafter.fingerprint),
        ):
            if trained_for != current:
                raise UserError(
                    f"policy {self.path}: trained for {what} {trained_for}, this is {current}"
                )
        self.fingerprint = digest(self.net)
        self.net.to(target.device).eval().requires_grad_(False)
        trained = drafter.trained_block_size
        verify = config.block_mode == "verify"
        self.blocks = [
            Block(trained if verify and size > 1 else size, size) for size in config.sizes
        ]
        self.block_size, self.block_mode = max(config.sizes), config.block_mode
        self.widest = max(block.drafted for block in self.blocks)

    def start(self, view: View) -> None:
        """Choose the size of this prompt."""
        prefill = view.prefill
        self._plan = self.choose(prefill.logits[-1], prefill.hidden[-1], len(view.prompt_ids))
        self.speculates = self._plan.verified > 1

    def choose(self, logits: Tensor, hidden: Tensor, n_prompt_tokens: int) -> Block:
        """The block of a prompt with prefill logits [V] and hidden state [D]."""
        length = torch.tensor([n_prompt_tokens], device=logits.device)
        return self.blocks[int(self.scores(logits[None], hidden[None], length).argmax())]

    def scores(self, logits: Tensor, hidden: Tensor, n_prompt_tokens: Tensor) -> Tensor:
        """Scores [P, m] of the sizes for logits [P, V], hidden states [P, D] and lengths [P]."""
        return self.net(features_of(self.net.config.features, logits, hidden, n_prompt_tokens))

    def block(self, view: View) -> Block:
        return self._plan

    def next(self, draft: Draft, view: View) -> Draft:
        return draft.cut(self._plan.verified - 1)

    def observe(self, verdict: Verdict) -> None:
        """The size of a prompt stays."""

    def replay_blocks(self) -> list[Block]:
        return self.blocks


def _random(target: TargetModel, drafter: Drafter) -> BlockSizeNet:
    trained = drafter.trained_block_size or 1
    sizes = tuple(range(max(1, trained - _RADIUS), trained + _RADIUS + 1))
    config = PredictorConfig(
        sizes=sizes,
        block_mode="draft",
        features="logits",
        hidden=16,
        depth=2,
        dropout=0.0,
        target=target.name,
        target_fingerprint=target.fingerprint,
        dtype=str(target.dtype).removeprefix("torch."),
        drafter=drafter.fingerprint,
        vocab_size=target.embed_rows,
        hidden_size=target.config.hidden_size,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BlockSizeNet(config).eval()
