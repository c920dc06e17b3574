"""Learning of a SpecBlock drafter from what its target commits, while it decodes.

The verifier's own output is the label: what it committed is the text that is learnt, by the losses
of training (specblock_loss.py) with its tokens in the place of the target's distribution. Updates
are made between prompts, in the time of the next one, when a bandit (update_bandit.py) says so. The
arm `rank_head` teaches the rank head alone, `all` everything; an update goes once over the newest
texts. What learns is a copy in float32, for in 16 bits small steps are lost.

Letters: P prompt tokens, T tokens of a text, F width of the target's features.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.base.devices import has_16_bit_products
from blockpilot.base.errors import UserError
from blockpilot.decoding.protocols import TargetModel
from blockpilot.decoding.types import Verdict, View
from blockpilot.drafters.specblock_loss import Rollout, draft_loss, rank_classes, rank_loss
from blockpilot.drafters.specblock_net import SpecBlockNetwork
from blockpilot.drafters.update_bandit import WINDOW, UpdateBandit

log = logging.getLogger(__name__)

ARMS = ("rank_head", "all")
_RATE = 1e-4  # of AdamW, twice that of the published training
_CLIP = 0.5
_ANCHORS = 48  # of a text, at most

_WEIGHTS = "weights."
_STATE = "state"  # JSON as bytes


@dataclass
class _Text:
    """A conversation as it comes in: the features of all tokens but the last."""

    prompt_length: int
    ids: list[Tensor]
    features: list[Tensor]
    begun_s: float
    ended_s: float = 0.0
    committed: int = field(default=0)


class SpecBlockLearner:
    """Teaches the network that a drafter serves with; `updates` counts how often.

    `horizon` is over how many tokens an update has to pay for itself.
    """

    def __init__(self, network: SpecBlockNetwork, target: TargetModel, horizon: int) -> None:
        self.network, self.target, self.horizon = network, target, horizon
        self.own = copy.deepcopy(network).to(target.device).requires_grad_(True)
        self.first = copy.deepcopy(self.own.state_dict())
        self._index = self.own.draft_index()
        self.forget()

    def forget(self) -> None:
        """As if nothing had been seen or learnt."""
        self.updates = 0
        self.bandit = UpdateBandit(self.horizon, ARMS)
        self._texts: deque[_Text] = deque(maxlen=WINDOW)
        self._text: _Text | None = None
        self._serve(self.first)

    def begin(self, view: View) -> None:
        """A prompt comes; learn first from those before it, if that pays."""
        if (text := self._text) is not None and text.committed:
            self.bandit.seen(text.committed, text.ended_s - text.begun_s)
            self._texts.append(text)
        if arm := self.bandit.choose():
            begun_s = perf_counter()
            self._update(arm)
            self.bandit.updated(arm, perf_counter() - begun_s)
            self.updates += 1
            log.info("update %d of the drafter: %s", self.updates, arm)
        assert view.new_features is not None
        ids = [view.prompt_ids, view.anchor]
        self._text = _Text(len(view.prompt_ids), ids, [view.new_features], perf_counter())

    def observe(self, verdict: Verdict) -> None:
        """What a cycle committed."""
        assert self._text is not None
        assert verdict.features is not None
        self._text.ids.append(torch.tensor(verdict.tokens, device=verdict.features.device))
        self._text.features.append(verdict.features)
        self._text.committed += len(verdict.tokens)
        self._text.ended_s = perf_counter()

    def snapshot(self) -> dict[str, Tensor]:
        """Weights and what the bandit knows, on the CPU; texts are not kept."""
        known = {"updates": self.updates, "bandit": self.bandit.state()}
        weights = {
            _WEIGHTS + name: tensor.detach().cpu().clone()
            for name, tensor in self.own.state_dict().items()
        }
        return weights | {_STATE: torch.tensor(list(json.dumps(known).encode()), dtype=torch.uint8)}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a `snapshot` of the same network."""
        self.forget()
        known = json.loads(bytes(saved[_STATE].tolist()))
        self.updates = known["updates"]
        self.bandit.restore(known["bandit"])
        self._serve({name: saved[_WEIGHTS + name] for name in self.first})

    def _serve(self, weights: Mapping[str, Tensor]) -> None:
        self.own.load_state_dict(weights)
        self._hand_over()

    @torch.no_grad()
    def _hand_over(self) -> None:
        """In place, for the kernels point to the network's memory."""
        pairs = zip(self.network.parameters(), self.own.parameters(), strict=True)
        for served, learnt in pairs:
            served.copy_(learnt)

    def _update(self, arm: str) -> None:
        """One step for each of the newest texts.

        Raises UserError, and serves with the weights of before, when a loss is not finite.
        """
        # Decoding runs without gradients, and what it made is not fit for them.
        with torch.inference_mode(False), torch.enable_grad():
            learnt = list((self.own.rank_head if arm == "rank_head" else self.own).parameters())
            optimizer = torch.optim.AdamW(learnt, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
            draws = torch.Generator().manual_seed(self.updates)
            for text in self._texts:
                optimizer.zero_grad()
                loss = self.loss(text, arm, draws)
                if not loss.isfinite():
                    raise UserError(
                        f"update {self.updates + 1} of the drafter: the loss is not finite; set "
                        "drafter.adapt=null"
                    )
                loss.backward()
                torch.nn.utils.clip_grad_norm_(learnt, _CLIP)
                optimizer.step()
            self._hand_over()

    def loss(self, text: _Text, arm: str, draws: torch.Generator) -> Tensor:
        """Loss of one text, of the rank head alone or of everything."""
        own, everything = self.own, arm != "rank_head"
        dtype = own.fc.weight.dtype
        ids = torch.cat([each.clone() for each in text.ids])
        features = torch.cat([each.clone() for each in text.features]).to(dtype)
        chosen = torch.randperm(text.committed, generator=draws)[:_ANCHORS].sort().values
        rollout = Rollout.of(ids, text.prompt_length + chosen, own.config.slots, draws)
        known, spread = rollout.known, rollout.spread
        labels = rollout.labels[known]
        index, has_row = self._index[labels], own.t2d[labels]
        with torch.autocast(
            ids.device.type, dtype=torch.bfloat16, enabled=has_16_bit_products(ids.device)
        ):
            with torch.set_grad_enabled(everything):
                normed = own(
                    *(features, self.target.embed(ids[1:]).to(dtype), rollout.anchors),
                    *(rollout.continued, self.target.embed(rollout.read).to(dtype)),
                )[known]
                logits = own.lm_head(normed).float()
            ranked = own.rank_head(normed, logits).float()
        classes = rank_classes(logits, index, has_row)
        loss = rank_loss(spread(ranked), spread(classes), known)
        if everything:
            hard = F.cross_entropy(logits, index, reduction="none")
            loss = loss + draft_loss(spread(hard), spread(classes), spread(has_row))
        return loss
