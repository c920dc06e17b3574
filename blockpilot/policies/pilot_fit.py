"""Fits the model of the policy `pilot` to replays, along the cycles that the policy itself takes.

What a situation promises depends on how one gets into it: behind a copy that failed the next one is
worth less. So the policy walks each answer, by the model of the round before, and what copies and
candidates would have had accepted at the anchors that it visits are the examples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from blockpilot.base.errors import UserError
from blockpilot.costs.curve import CostCurve
from blockpilot.decoding.anchors import KnownAnswer, Replay
from blockpilot.decoding.replay import decided, known_candidates, known_path
from blockpilot.decoding.types import Block, Candidates, View
from blockpilot.policies.pilot import LONGEST_COPY, NODES, PilotPolicy
from blockpilot.policies.tree import best_first, tree_draft
from blockpilot.predictor.acceptance import (
    AcceptanceModel,
    copy_features,
    draft_features,
    node_features,
    unfitted,
)
from blockpilot.predictor.acceptance_fit import Outcomes
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN

log = logging.getLogger(__name__)

_ROUNDS = 2  # walks, each by the model of the one before
_RANKS = 6  # candidates of a slot that are learnt from
_NODES = 8  # of the tree that says what a draft brings


@dataclass(frozen=True)
class Answered:
    """An answer of a sweep with its replay, and the prompt, turn and seed that it answers."""

    prompt_set: str
    prompt_id: str
    prompt_hash: str
    turn: int
    seed: int
    known: KnownAnswer
    replay: Replay


@dataclass(frozen=True)
class Pair:
    """Whose answers and drafts they are."""

    target: str
    drafter: str
    trained_block_size: int


def answers_of(run: RunFolder, split: str | None) -> tuple[Pair, list[Answered]]:
    """The pair and the answers of a replayed sweep of one split; None: of any.

    Raises UserError for a sweep without marginals or of another split.
    """
    records = run.records()
    if not run.has_replays:
        raise UserError(f"runs: {run.path} kept no replays; set mode=replay in its sweep")
    if split is not None and (others := sorted(set(records["split"]) - {split})):
        raise UserError(f"runs: {run.path} has prompts of split {others[0]}; allowed is {split}")
    drafted = records[records["trained_block_size"].notna()]
    if drafted.empty:
        raise UserError(f"runs: {run.path} has no drafter")
    first = drafted.iloc[0]
    pair = Pair(first["target"], first["drafter_checkpoint"], int(first["trained_block_size"]))
    answers = []
    rows = records[(records["method"] == PLAIN) & (records["n_new_tokens"] > 1)]
    for row in rows.to_dict("records"):
        text, replay, _ = run.replay({str(key): value for key, value in row.items()})
        if replay.marginals is None:
            raise UserError(f"runs: {run.path} was made with replay.marginals=false")
        prefill = run.prefill({str(key): value for key, value in row.items()})
        known = KnownAnswer(
            text.ids[: text.prompt_length],
            text.ids[text.prompt_length :],
            row["stop_reason"],
            float(row["temperature"]),
            prefill.logits,
            prefill.hidden,
        )
        key = row["prompt_set"], row["prompt_id"], row["prompt_hash"], row["turn"], row["seed"]
        answers.append(Answered(*key, known, replay))
    return pair, answers


def fit_acceptance(
    pair: Pair,
    answers: Sequence[Answered],
    curve: CostCurve,
    *,
    origin: dict[str, Any],
    shuffle: int | None = None,
) -> AcceptanceModel:
    """The model of some answers. With `shuffle`, a seed, outcomes are dealt to others' situations:
    a control that knows what is usual and nothing more.
    """
    model = unfitted()
    for round_ in range(_ROUNDS):
        policy = RecordingPolicy(path=None, cost=None, nodes=NODES, longest_copy=LONGEST_COPY)
        policy.ready(pair.trained_block_size, True, model)
        policy.curve = curve
        for each in answers:
            policy.record(each)
        outcomes = policy.outcomes
        if not outcomes.draft:
            raise UserError(
                f"runs: no answer is longer than a block of {pair.trained_block_size}, so none "
                "tells what a draft has accepted"
            )
        if shuffle is not None:
            outcomes = outcomes.shuffled(np.random.default_rng(shuffle))
        model = outcomes.fit(origin)
        log.info("round %d: %s", round_ + 1, outcomes)
    return model


class RecordingPolicy(PilotPolicy):
    """Notes at every cycle what copies and candidates would have had accepted."""

    def record(self, answered: Answered) -> None:
        """Walk one answer."""
        assert answered.replay.marginals is not None
        self._answer, self._marginals = answered.known.tokens, answered.replay.marginals
        decided(self, answered.replay, answered.known)

    @property
    def outcomes(self) -> Outcomes:
        """What the walks so far have seen."""
        if not hasattr(self, "_outcomes"):
            self._outcomes = Outcomes()
        return self._outcomes

    def block(self, view: View) -> Block:
        block = super().block(view)
        place = view.position - len(view.prompt_ids)
        following = self._answer[place + 1 :]
        best = known_candidates(self._marginals, place)
        self._note_copy(following)
        self._note_draft(best, following)
        self._note_nodes(best, following)
        return block

    def _note_copy(self, following: Sequence[int]) -> None:
        """The copied tokens up to the first wrong one."""
        pairs = zip(self._copy.tokens, following, strict=False)
        for place, (copied, own) in enumerate(pairs, start=1):
            hit = copied == own
            self.outcomes.copy.append((copy_features(self.situation, place), hit))
            if not hit:
                return

    def _note_draft(self, best: Candidates, following: Sequence[int]) -> None:
        """What a tree of the usual size has accepted, where the answer goes on behind it."""
        if len(following) < len(best.tokens):
            return
        tree = tree_draft(best_first(best.logprobs, _NODES, best.after), best, torch.device("cpu"))
        accepted = len(known_path(tree, following))
        self.outcomes.draft.append((draft_features(self.situation), float(accepted)))

    def _note_nodes(self, best: Candidates, following: Sequence[int]) -> None:
        """The candidates of each slot, as long as the answer goes on as the copy."""
        rank = 0
        slots = zip(best.tokens, self._copy.tokens, self._chances, following, strict=False)
        for slot, (tokens, copied, trust, own) in enumerate(slots):
            row = best.row(slot, rank)
            order = sorted(range(len(row)), key=lambda place: -row[place])[:_RANKS]
            chances = {tokens[place]: math.exp(row[place]) for place in order}
            chances.setdefault(copied, 0.0)
            for token, chance in chances.items():
                features = node_features(chance, token == copied, trust, slot)
                self.outcomes.node.append((features, token == own))
            if own != copied or own not in tokens:
                return
            rank = tokens.index(own)
