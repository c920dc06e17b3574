"""Recipe `path_head`: a head over a block drafter that stays as it is, taught to read the path.

The drafter's states are computed once per conversation and kept; only the best tokens of a slot are
scored, behind the text's own token before (teacher forcing, as published: DFlash2's selector loss).

Little text says little of most tokens, so a codebook is a projection of the target's frozen
embedding plus what is learnt of single tokens: that starts at 0 and is held small. It is saved as
one plain table.

Letters: A anchors, S = B - 1 slots of a block, n kept slots, K best tokens of a slot, D width,
V vocabulary rows, r rank, R tokens of a response.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpilot.app.config import TrainingConfig
from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method
from blockpilot.decoding.paths import greedy_chain, within
from blockpilot.decoding.replay import slot_labels
from blockpilot.decoding.target import Target, capped
from blockpilot.distill.blocks import sample_anchors
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.dflash import blocks_of
from blockpilot.distill.losses import Candidates
from blockpilot.distill.recipe import Autocast, Blueprint, walked_tau
from blockpilot.distill.states import input_dtype, states_of
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_load import load_network
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.drafters.forms.checkpoints import read_checkpoint
from blockpilot.drafters.forms.dflash import DFlashConfig
from blockpilot.drafters.path_head import (
    TOP_K,
    PathHead,
    PathHeadConfig,
    drafter_digest,
    new_path_head,
    save_path_head,
)
from blockpilot.policies.fixed import FixedPolicy

SMOOTHING = 0.5
"""A slot weighs as much as its prefix is likely to be accepted, each earlier label counting
(1 - SMOOTHING) q + SMOOTHING with the drafter's probability q of it (as in D-PACE)."""

_ROWS = 64  # slots whose logits are held at once


@dataclass(frozen=True, kw_only=True)
class PathHeadRecipe:
    """Shape and loss of a path head; conf/recipe/path_head.yaml says what each value means."""

    name: ClassVar[str] = "path_head"

    drafter: str
    kind: str
    rank: int
    soft_labels: float
    token_penalty: float

    @property
    def description(self) -> str:
        """Of a finished head, for its model card."""
        return (
            f"Path head ({self.kind}) of the DFlash drafter `{self.drafter}` of {{repo}}:\n"
            "what the token before adds to the logits of a slot's best tokens. `config.json` and\n"
            "bf16 safetensors under the published names; the drafter is not part of it."
        )

    @cached_property
    def n_target_layers(self) -> int:
        """Layers of the target that the drafter reads (UserError where it cannot be read)."""
        if self.drafter == "random":
            return 5
        raw, tensors = read_checkpoint(self.drafter)
        return len(DFlashConfig.parse(raw, self.drafter, tensors=tensors).target_layer_ids)

    def blueprint(
        self, target: Target, name: str, block_size: int, training: TrainingConfig
    ) -> Blueprint:
        """A new head of the recipe's drafter, whose blocks have to be of `block_size` slots."""
        network = load_network(self.drafter, target)
        if not network.config.plain:
            raise UserError(
                f"recipe.drafter={self.drafter}: a {network.config.form} drafter; a path head is "
                "trained on a plain z-lab one"
            )
        if network.config.block_size != block_size:
            raise UserError(
                f"new_drafter.block_size={block_size}: {self.drafter} has blocks of "
                f"{network.config.block_size}"
            )
        if training.init is not None:
            raise UserError(
                f"training.init={training.init}: a path head is trained anew; allowed is null"
            )
        # The digest is of the weights as they were loaded, before they are cast.
        shape: Any = target.config
        config = PathHeadConfig(
            self.kind,
            self.rank,
            shape.hidden_size,
            shape.vocab_size,
            TOP_K,
            skips_first=True,
            drafter=drafter_digest(network),
        )
        network = network.to(target.device, input_dtype(target)).eval().requires_grad_(False)

        def student(corpus: Corpus) -> PathHeadStudent:
            seen = corpus.response_vocabulary(target.embed_rows)
            n_anchors = training.anchors_per_sequence
            return PathHeadStudent(network, target, config, self, seen, n_anchors)

        return Blueprint(network.config.target_layer_ids, student)


class TrainedHead(nn.Module):
    """A head as it is trained: projections of the target's embedding, and rows of single tokens."""

    def __init__(self, config: PathHeadConfig, embedding: Tensor) -> None:
        super().__init__()
        width, rank = embedding.shape[1], config.rank
        scale = width**-0.5
        # Of one scale for every target, so that one learning rate serves.
        centred = embedding.float() - embedding.float().mean(dim=0)
        self.embedding = centred / centred.square().mean().sqrt()
        self.predecessor = nn.Parameter(scale * torch.randn(width, rank))
        self.successor = nn.Parameter(0.3 * scale * torch.randn(width, rank))
        if config.kind == "selector":
            self.hidden_projection = nn.Parameter(0.3 * scale * torch.randn(width, rank))
        self.token_rows = nn.ParameterDict(
            {name: torch.zeros(len(embedding), rank) for name in ("predecessor", "successor")}
        )

    def forward(self, hidden: Tensor, before: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the logits of tokens [n, K] gain behind a token [n] each: [n, K], and the mean
        square length of the rows of single tokens that it read."""
        ids, index = torch.cat([before[:, None], tokens], dim=1).unique(return_inverse=True)
        embedded, rows = self.embedding[ids], self.token_rows
        earlier = (embedded @ self.predecessor + rows["predecessor"][ids])[index[:, 0]]  # [n, r]
        later = (embedded @ self.successor + rows["successor"][ids])[index[:, 1:]]  # [n, K, r]
        if hasattr(self, "hidden_projection"):
            earlier = earlier * (hidden @ self.hidden_projection)
        read = rows["predecessor"][before].square().sum(dim=-1).mean()
        read = read + rows["successor"][tokens].square().sum(dim=-1).mean()
        return (later @ earlier[..., None])[..., 0], read

    def plain(self, config: PathHeadConfig) -> PathHead:
        """The head with its codebooks written out."""
        tables = {
            name: self.embedding @ getattr(self, name) + rows
            for name, rows in self.token_rows.items()
        }
        head = new_path_head(config)
        if config.kind == "selector":
            named = {
                "candidate_selector.hidden_projection.weight": self.hidden_projection.T,
                "candidate_selector.predecessor_codebook": tables["predecessor"],
                "candidate_selector.successor_codebook": tables["successor"],
            }
        else:
            named = {
                "markov_head.markov_w1.weight": tables["predecessor"],
                "markov_head.markov_w2.weight": tables["successor"],
            }
        head.load_state_dict({key: table.detach() for key, table in named.items()})
        return head.to(self.predecessor.device).requires_grad_(False)


@dataclass(frozen=True)
class Slots:
    """What the loss reads of one conversation: slots whose label, and all labels before it in the
    block, are among the best tokens. The first slot of a block teaches nothing: the drafter knows
    the anchor."""

    hidden: Tensor  # [n, D]
    before: Tensor  # [n]
    tokens: Tensor  # [n, K]
    logits: Tensor  # [n, K]
    label: Tensor  # [n] place among the K
    wanted: Tensor  # [n, K] the target's distribution among the K
    weight: Tensor  # [n]


class PathHeadStudent:
    """A head that learns from `n_anchors` blocks of a frozen drafter a conversation."""

    def __init__(
        self,
        drafter: DFlashNetwork,
        target: Target,
        config: PathHeadConfig,
        recipe: PathHeadRecipe,
        seen: Tensor,
        n_anchors: int,
    ) -> None:
        self.drafter, self.target, self.config, self.recipe = drafter, target, config, recipe
        self.n_anchors = n_anchors
        everything = torch.arange(target.embed_rows, device=target.device)
        self.network = TrainedHead(config, target.embed(everything)).to(target.device)
        self.seen = seen.to(target.device)  # tokens that no response holds are no label
        self.head = target.head_rows.to(input_dtype(target))[self.seen]
        self._slots: dict[bytes, Slots] = {}
        self._blocks: dict[bytes, tuple[Tensor, ...]] = {}

    def published(self) -> dict[str, Any]:
        return self.config.published()

    def compile(self, backend: str) -> None:
        self.network.compile(backend=backend, dynamic=True)

    def candidates(self, generator: torch.Generator) -> Candidates:
        """None: every slot has its own."""
        nothing = torch.empty(0)
        return Candidates(nothing, nothing, nothing, None)

    def loss(
        self,
        model: nn.Module,
        autocast: Autocast,
        example: Example,
        candidates: Candidates,
        generator: torch.Generator,
    ) -> Tensor:
        """Weighted mean cross-entropy among the best tokens of the slots of one conversation.

        In float32: the head is small, and its states are kept rather than computed.
        """
        slots = self._kept(example)
        bias, read = model(slots.hidden.float(), slots.before, slots.tokens)
        logprobs = (slots.logits + bias).log_softmax(dim=-1)
        hard = -logprobs.gather(1, slots.label[:, None])[:, 0]
        soft = -(slots.wanted * logprobs).sum(dim=-1)
        share = self.recipe.soft_labels
        losses = slots.weight * ((1 - share) * hard + share * soft)
        # A conversation without slots gives no gradient, but the parameters take part.
        mean = losses.sum() / slots.weight.sum().clamp_min(1e-6)
        return mean + self.recipe.token_penalty * read.nan_to_num()

    def _kept(self, example: Example) -> Slots:
        """The slots of a conversation, found at its first use: its anchors are its own, so that a
        run that continues finds the same."""
        key = example.ids.numpy().tobytes()
        if key not in self._slots:
            generator = torch.Generator().manual_seed(int(example.ids.sum()))
            with torch.no_grad():
                self._slots[key] = self._found(example, generator)
        return self._slots[key]

    def _found(self, example: Example, generator: torch.Generator) -> Slots:
        ids = example.ids.to(self.target.device)
        anchors = sample_anchors(example.prompt_length, len(ids), self.n_anchors, generator)
        anchors = anchors.to(ids.device)
        labels, known = slot_labels(ids, anchors, self.drafter.config.block_size)
        hidden, head_inputs = self._states(example, anchors)
        tokens, logits, normalizer = self._best(hidden, self.head)
        tokens = self.seen[tokens]
        hits = (tokens == labels[..., None]) & known[..., None]  # [A, S, K]
        among, place = hits.any(dim=-1), hits.int().argmax(dim=-1)
        probability = (logits.gather(-1, place[..., None])[..., 0] - normalizer).exp() * among
        passed = (1 - SMOOTHING) * probability + SMOOTHING
        reach = F.pad(passed[:, :-1].cumprod(dim=1), (1, 0), value=1.0)
        kept = among.cumprod(dim=1).bool()
        kept[:, 0] = False
        before = torch.cat([ids[anchors][:, None], labels[:, :-1]], dim=1)
        positions = anchors[:, None] + torch.arange(1, labels.shape[1] + 1, device=ids.device)
        rows = self.target.head_rows[tokens[kept]].float()  # [n, K, D]
        said = head_inputs[(positions - example.prompt_length)[kept]].float()
        own = capped((rows @ said[..., None])[..., 0], self.target.logit_shape.cap)
        return Slots(
            hidden[kept].to(torch.bfloat16 if hidden.is_cuda else torch.float16),
            before[kept],
            tokens[kept],
            logits[kept],
            place[kept],
            own.softmax(dim=-1),
            reach[kept],
        )

    def _states(self, example: Example, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """The drafter's final states [A, S, D] behind anchors, and the inputs [R, D] of the LM head
        that chose the response."""
        features, head_inputs = states_of(
            self.target, example, self.drafter.config.target_layer_ids
        )
        blocks = blocks_of(self.target, self.drafter, example.ids.to(anchors.device), anchors)
        return self.drafter(features, blocks, anchors)[:, 1:], head_inputs

    def _best(self, hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Best K rows of a head and their logits [A, S, K], and the logsumexp [A, S] of all."""
        parts = []
        for some in hidden.flatten(0, 1).split(_ROWS):
            logits = capped(F.linear(some, head).float(), self.target.logit_shape.cap)
            top = logits.topk(min(self.config.top_k, len(head)), dim=-1)
            parts.append((top.indices, top.values, logits.logsumexp(dim=-1)))
        found = [torch.cat(part) for part in zip(*parts, strict=True)]
        tokens, logits, normalizer = (each.unflatten(0, hidden.shape[:2]) for each in found)
        return tokens, logits, normalizer

    @torch.no_grad()
    def tau(self, example: Example) -> float:
        """Tau of the chain along the head as it would be saved, but for its rounding."""
        key = example.ids.numpy().tobytes()
        ids = example.ids.to(self.target.device)
        anchors = torch.arange(example.prompt_length, len(ids) - 1, device=ids.device)
        labels, known = slot_labels(ids, anchors, self.drafter.config.block_size)
        if key not in self._blocks:
            hidden, _ = self._states(example, anchors)
            tokens, logits, _ = self._best(hidden, self.target.head_rows.to(hidden.dtype))
            self._blocks[key] = hidden, tokens, logits
        hidden, tokens, logits = self._blocks[key]
        bias = self._plain.of_block(hidden.float(), ids[anchors], tokens)
        return walked_tau(greedy_chain(tokens, within(logits, bias)), labels, known)

    @property
    def _plain(self) -> PathHead:
        return self.network.plain(self.config)

    def save(self, folder: Path) -> None:
        save_path_head(self._plain, folder)

    def method(self, folder: Path) -> Method:
        policy = FixedPolicy(block_size=self.drafter.config.block_size, block_mode="draft")
        drafter = DFlashDrafter(checkpoint=self.recipe.drafter, ignore_keys=[], head=str(folder))
        return Method(drafter, policy)
