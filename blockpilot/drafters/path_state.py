"""Parts of block drafters that read the tokens chosen so far and add to a slot's logits.

Slot by slot a vector c follows from the token before, the slot's state h and what was read earlier;
the slot's logits gain W c, over the whole vocabulary of the LM head. So a chain has one product a
slot, and the logits of a draft are those behind the best chain. DSpark's Markov heads
(deepseek-ai/DeepSpec) and Domino's recurrent one (arXiv 2605.29707).

Letters: A drafts side by side, S slots, D width, V rows of the LM head, r width of c, s of a state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpilot.drafters.forms.dflash import PathShape


class PathState(nn.Module):
    """Reads a path token by token."""

    skipped = 0  # first slots that stay as they are

    @abstractmethod
    def begin(self, hidden: Tensor) -> Tensor:
        """State [A, s] before anything is read; `hidden` [A, D] is of the first slot."""

    @abstractmethod
    def step(
        self, state: Tensor, hidden: Tensor, before: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor]:
        """c [A, r] of a slot with state `hidden` [A, D] behind the tokens `before` [A], whose
        target embeddings are `embedding` [A, D], and the next state."""

    @property
    @abstractmethod
    def output(self) -> Tensor:
        """W [V, r]."""

    def chain(
        self,
        hidden: Tensor,  # [A, S, D]
        anchors: Tensor,  # [A] tokens
        logits_of: Callable[[int], Tensor],  # slot -> [A, V] without this part
        embed: Callable[[Tensor], Tensor],  # target ids -> embeddings of the target
        target_ids: Callable[[Tensor], Tensor],  # of ids of the LM head's rows
    ) -> tuple[Tensor, Tensor]:
        """Target ids [A, S] of the greedy chain and the vectors [A, S, r] along it."""
        before, state = anchors, self.begin(hidden[:, 0])
        tokens, vectors = [], []
        for slot in range(hidden.shape[1]):
            vector, state = self.step(state, hidden[:, slot], before, embed(before))
            if slot < self.skipped:
                vector = torch.zeros_like(vector)
            best = (logits_of(slot) + vector @ self.output.T).argmax(dim=-1)
            before = target_ids(best)
            tokens.append(before)
            vectors.append(vector)
        return torch.stack(tokens, dim=1), torch.stack(vectors, dim=1)


class MarkovState(PathState):
    """DSpark's heads: e = W1[token before], and c = e (vanilla), sigm(G [h; e]) * e (gated), or the
    output of a small recurrent cell on [state; e; h] (rnn).
    """

    def __init__(self, shape: PathShape, width: int, vocabulary: int, rows: int) -> None:
        super().__init__()
        self.kind, self.rank = shape.kind, shape.rank
        self.markov_w1 = nn.Embedding(vocabulary, shape.rank)
        self.markov_w2 = nn.Linear(shape.rank, rows, bias=False)
        if shape.kind == "gated":
            self.gate_proj = nn.Linear(width + shape.rank, shape.rank)
        elif shape.kind == "rnn":
            self.joint_proj = nn.Linear(2 * shape.rank + width, 3 * shape.rank)

    @property
    def output(self) -> Tensor:
        return self.markov_w2.weight

    def begin(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), self.rank)

    def step(
        self, state: Tensor, hidden: Tensor, before: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor]:
        e = self.markov_w1(before)
        if self.kind == "gated":
            e = torch.sigmoid(self.gate_proj(torch.cat([hidden, e], dim=-1))) * e
        elif self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, e, hidden], dim=-1))
            gate, new, e = joint.chunk(3, dim=-1)
            gate, e = torch.sigmoid(gate), torch.tanh(e)
            state = gate * state + (1 - gate) * torch.tanh(new)
        return e, state


class DominoState(PathState):
    """Domino: a GRU reads the tokens' embeddings; c = SiLU(W1 [h; state])."""

    def __init__(self, shape: PathShape, width: int, rows: int) -> None:
        super().__init__()
        self.skipped = shape.skipped
        self.prefix_gru = nn.GRU(width, shape.state, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + shape.state, shape.rank, bias=False),
            nn.SiLU(),
            nn.Linear(shape.rank, rows, bias=False),
        )

    @property
    def output(self) -> Tensor:
        weight = self.embed_proj[2].weight
        assert isinstance(weight, Tensor)
        return weight

    def begin(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), self.prefix_gru.hidden_size)

    def step(
        self, state: Tensor, hidden: Tensor, before: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights: Any = self.prefix_gru
        state = torch.gru_cell(embedding, state, weights.weight_ih_l0, weights.weight_hh_l0)
        return F.silu(self.embed_proj[0](torch.cat([hidden, state], dim=-1))), state


def new_path_state(shape: PathShape, width: int, vocabulary: int, rows: int) -> PathState:
    """The part of a drafter of this width whose LM head has `rows` rows."""
    if shape.kind == "domino":
        return DominoState(shape, width, rows)
    return MarkovState(shape, width, vocabulary, rows)
