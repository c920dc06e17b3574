"""Recipe `eagle3`: unrolled steps that read their own outputs (training-time test, 2503.01840).

The target's embedding is frozen; the head learns its own rows of the draft vocabulary.

Letters: A anchors, S unrolled steps, D width, K draft vocabulary, R tokens of a response.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blockpilot.app.config import TrainingConfig
from blockpilot.base.devices import has_16_bit_products
from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method
from blockpilot.decoding.replay import slot_labels
from blockpilot.decoding.target import Target
from blockpilot.distill.blocks import sample_anchors
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.losses import Candidates, cross_entropies, soft_targets
from blockpilot.distill.recipe import FINAL_NORM, Autocast, Blueprint, walked_tau
from blockpilot.distill.states import input_dtype, states_of
from blockpilot.drafters.eagle3 import Eagle3Drafter, load_head, new_head
from blockpilot.drafters.eagle3_net import Eagle3Network
from blockpilot.drafters.forms.checkpoints import save_checkpoint
from blockpilot.drafters.forms.eagle3 import default_layers
from blockpilot.policies.fixed import FixedPolicy

STEP_DECAY = 0.8  # weight of step i is STEP_DECAY ** i, as in the authors' training


@dataclass(frozen=True, kw_only=True)
class Eagle3Recipe:
    """Shape of an EAGLE-3 head; conf/recipe/eagle3.yaml says what each value means.

    The loss is as published: soft labels only, weights of steps that fall by STEP_DECAY.
    """

    name: ClassVar[str] = "eagle3"
    description: ClassVar[str] = (
        "EAGLE-3 head of {repo}, in the form of the published heads: `config.json` and bf16\n"
        "safetensors, without embedding, which is the target's. Measured as a chain."
    )
    n_target_layers: ClassVar[int] = 3

    draft_vocabulary: int

    def blueprint(
        self, target: Target, name: str, block_size: int, training: TrainingConfig
    ) -> Blueprint:
        """A new head over the tokens that occur most often in the responses, or a given one."""
        given = None if training.init is None else self.given_head(target, training.init)
        if given is None:
            layers = default_layers(target.config.num_hidden_layers, name)
        else:
            layers = given.config.target_layer_ids

        def student(corpus: Corpus) -> Eagle3Student:
            network = self.new_head(target, corpus) if given is None else given
            network = network.to(target.device)
            return Eagle3Student(network, target, block_size, training.anchors_per_sequence)

        return Blueprint(layers, student)

    def new_head(self, target: Target, corpus: Corpus) -> Eagle3Network:
        """A random layer under the target's own rows of its draft vocabulary."""
        ids = corpus.frequent_tokens(self.draft_vocabulary, target.embed_rows)
        head = new_head(target, ids)
        head.lm_head.weight.data.copy_(target.head_rows[ids.to(target.device)])
        torch.nn.init.constant_(head.norm.weight, FINAL_NORM)
        return head

    def given_head(self, target: Target, init: str) -> Eagle3Network:
        """The head that training continues from (UserError when it is not of this recipe)."""
        head = load_head(init, target)
        if head.config.embeds:
            raise UserError(
                f"training.init={init}: the head has an embedding of its own, which is not "
                "trained; allowed are heads that use the target's"
            )
        if head.config.draft_vocab_size > self.draft_vocabulary:
            raise UserError(
                f"training.init={init}: its draft vocabulary has {head.config.draft_vocab_size} "
                f"tokens, recipe.draft_vocabulary={self.draft_vocabulary} asks for fewer"
            )
        return head


class Eagle3Student:
    """A head that learns the target's distribution `block_size` - 1 tokens ahead of `n_anchors`
    tokens of a conversation."""

    def __init__(
        self, network: Eagle3Network, target: Target, block_size: int, n_anchors: int
    ) -> None:
        self.network, self.target = network, target
        self.block_size, self.n_anchors = block_size, n_anchors
        self.feature_layers = network.config.target_layer_ids
        ids = network.target_ids(torch.arange(len(network.d2t), device=network.d2t.device))
        head = target.head_rows.to(input_dtype(target))
        index = torch.zeros(head.shape[0], dtype=torch.int64, device=head.device)
        index[ids] = torch.arange(len(ids), device=head.device)
        no_offset = torch.zeros(1, device=head.device)
        cap = target.logit_shape.cap
        self.vocabulary = Candidates(head[ids.to(head.device)], no_offset, index, cap)
        self.cross_entropies = cross_entropies

    def published(self) -> dict[str, Any]:
        return self.network.config.published()

    def compile(self, backend: str) -> None:
        # Dynamo would cut the graph where gradients are sent, and its parts pass numbers that
        # inductor takes for tensors (torch 2.13).
        torch._dynamo.config.optimize_ddp = False
        self.network.compile(backend=backend, dynamic=True)
        self.cross_entropies = torch.compile(cross_entropies, backend=backend, dynamic=True)

    def candidates(self, generator: torch.Generator) -> Candidates:
        """The draft vocabulary, at every step."""
        return self.vocabulary

    def loss(
        self,
        model: nn.Module,
        autocast: Autocast,
        example: Example,
        candidates: Candidates,
        generator: torch.Generator,
    ) -> Tensor:
        """Soft cross-entropy of the steps behind random anchors of one sequence.

        A step whose target token the draft vocabulary lacks teaches nothing.
        """
        ids = example.ids.to(self.target.device)
        anchors = sample_anchors(example.prompt_length, len(ids), self.n_anchors, generator)
        anchors = anchors.to(ids.device)
        labels, known = slot_labels(ids, anchors, self.block_size)  # [A, S]
        known &= self.network.t2d[labels]
        steps = torch.arange(labels.shape[1], device=ids.device)
        read = ids[(anchors[:, None] + steps).clamp_max(len(ids) - 1)]
        features, head_inputs = states_of(self.target, example, self.feature_layers)
        positions = (anchors[:, None] + steps + 1 - example.prompt_length)[known]
        with autocast():
            hidden = model(features, self._embedded(ids[1:]), anchors, self._embedded(read))
            rows = self.network.lm_head.weight.to(hidden.dtype)
            expected, offset = soft_targets(head_inputs, candidates, rows, None)
            _, soft = self.cross_entropies(
                hidden[known],
                rows,
                candidates.offset,
                candidates.index[labels[known]],
                expected[positions],
                offset[positions],
                None,  # the head's own logits are under no cap
            )
        weights = (STEP_DECAY**steps).expand_as(known)[known]
        return (weights * soft).sum() / weights.sum().clamp_min(1e-6)

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids).to(input_dtype(self.target))

    @torch.no_grad()
    def tau(self, example: Example) -> float:
        network, ids = self.network, example.ids.to(self.target.device)
        anchors = torch.arange(example.prompt_length, len(ids) - 1, device=ids.device)
        labels, known = slot_labels(ids, anchors, self.block_size)
        features, _ = states_of(self.target, example, self.feature_layers)
        drawn: list[Tensor] = []

        def drafted(step: int, output: Tensor) -> Tensor:
            if step == 0:
                return self._embedded(ids[anchors])
            drawn.append(network.target_ids(network.lm_head(output).argmax(dim=-1)))
            return self._embedded(drawn[-1])

        with torch.autocast(
            ids.device.type, dtype=torch.bfloat16, enabled=has_16_bit_products(ids.device)
        ):
            outputs = network.unroll(
                features, self._embedded(ids[1:]), anchors, labels.shape[1], drafted
            )
            drafted(labels.shape[1], outputs[:, -1])
        return walked_tau(torch.stack(drawn, dim=1), labels, known)

    def save(self, folder: Path) -> None:
        save_checkpoint(self.network, self.published(), folder)

    def method(self, folder: Path) -> Method:
        """A chain as long as the unrolled steps."""
        drafter = Eagle3Drafter(
            checkpoint=str(folder),
            ignore_keys=[],
            depth=self.block_size - 2,
            top_k=1,
            block_size=self.block_size,
        )
        return Method(drafter, FixedPolicy(block_size=None, block_mode="draft"))
