"""Cycles of every block size from one stored answer, without decoding again.

With position-keyed sampling the answer does not depend on the drafts. So drafts from all anchors of
an answer are independent of each other and run as one batch; a draft is accepted while it equals
the answer; walking the accepted lengths from anchor to anchor visits the cycles that decoding would
have had, at any temperature.

Letters: T tokens of prompt and answer, A anchors, S = B - 1 proposed slots, V vocabulary rows,
F feature width, K top candidates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.anchors import KnownAnswer, Marginals, Replay, visited
from blockpilot.decoding.paths import within
from blockpilot.decoding.protocols import Drafter, PathProposals, Policy, Proposals, Replayable
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Block, Candidates, Draft, Forward, Trace, Verdict, View


def can_replay(drafter: Drafter | type[Drafter]) -> bool:
    """Whether a drafter, or a class of them, can be replayed: it offers it, or drafts nothing."""
    return hasattr(drafter, "replay") or getattr(drafter, "trained_block_size", 0) is None


def slot_labels(ids: Tensor, anchors: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Labels [A, S] of the slots after each anchor and whether they are known [A, S].

    Slots past the end of the sequence have no label; theirs repeats the last token.
    """
    places = anchors[:, None] + torch.arange(1, block_size, device=anchors.device)
    known = places < ids.shape[0]
    return ids[places.clamp_max(ids.shape[0] - 1)], known


def accepted_lengths(proposals: Proposals, labels: Tensor, known: Tensor) -> Tensor:
    """Leading proposals [A] that equal a known label.

    Slot by slot, and only for anchors that are still alive: the LM head costs more than a small
    drafter and most drafts end early.
    """
    accepted = torch.zeros(labels.shape[0], dtype=torch.int16, device=labels.device)
    alive = torch.arange(labels.shape[0], device=labels.device)
    for slot in range(labels.shape[1]):
        alive = alive[known[alive, slot]]
        if not len(alive):
            break
        logits = proposals.logits(alive, slot)
        if isinstance(proposals, PathProposals):
            top = logits.float().topk(min(proposals.n_scored, logits.shape[-1]), dim=-1)
            before = _before(proposals, labels, slot)[alive, None]
            bias = proposals.bias(alive, slot, before, top.indices)
            rank = within(top.values, bias)[:, 0].argmax(dim=-1, keepdim=True)
            best = top.indices.gather(1, rank)[:, 0]
        else:
            best = logits.argmax(dim=-1)
        alive = alive[best == labels[alive, slot]]
        accepted[alive] += 1
    return accepted


def _before(proposals: PathProposals, labels: Tensor, slot: int) -> Tensor:
    """The text's own tokens [A] before a slot."""
    return labels[:, slot - 1] if slot else proposals.anchors


def marginals(
    proposals: Proposals, labels: Tensor, known: Tensor, candidates: int
) -> tuple[Marginals, Tensor]:
    """Rank of the label and the top `candidates` of every slot, and the accepted lengths [A].

    A smaller vocabulary is kept whole, and what a path head scored is kept whatever is asked.
    """
    paths = proposals if isinstance(proposals, PathProposals) else None
    if paths is not None:
        candidates = max(candidates, paths.n_scored)
    rows = torch.arange(labels.shape[0], device=labels.device)
    alive = torch.ones_like(rows, dtype=torch.bool)
    accepted = torch.zeros_like(rows, dtype=torch.int16)
    ranks: list[Tensor] = []
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    after: list[Tensor] = []
    for slot in range(labels.shape[1]):
        logits = proposals.logits(rows, slot).float()  # [A, V]
        own = logits.gather(1, labels[:, slot, None])
        rank = (logits > own).sum(dim=-1)
        ranks.append(rank.masked_fill(~known[:, slot], -1).int())
        top = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
        best = logits.argmax(dim=-1)  # not rank 0: of equal logits decoding proposes one
        logprobs.append(top.values - logits.logsumexp(dim=-1, keepdim=True))
        if paths is not None:
            text = _before(paths, labels, slot)
            scored, best = _conditioned(paths, slot, top.indices, logprobs[-1], tokens, text)
            after.append(scored)
        tokens.append(top.indices.int())
        alive &= known[:, slot] & (best == labels[:, slot])
        accepted += alive
    kept = torch.stack(ranks, 1), torch.stack(tokens, 1), torch.stack(logprobs, 1)
    return Marginals(*kept, torch.stack(after, 1) if after else None), accepted


def _conditioned(
    proposals: PathProposals,
    slot: int,
    tokens: Tensor,  # [A, K] best of the slot
    logprobs: Tensor,  # [A, K]
    earlier: Sequence[Tensor],  # each [A, K] best of a slot before
    text: Tensor,  # [A] the text's own tokens before the slot
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [A, H, H] of a path head's candidates of one slot behind those of the slot
    before, and the token [A] that is best behind the text's."""
    n = min(proposals.n_scored, tokens.shape[1])
    tokens, logprobs = tokens[:, :n], logprobs[:, :n]
    before = earlier[-1][:, :n].long() if slot else text[:, None].expand(-1, n)
    rows = torch.arange(len(tokens), device=tokens.device)
    bias = proposals.bias(rows, slot, torch.cat([before, text[:, None]], dim=1), tokens)
    scores = within(logprobs, bias)
    best = tokens.gather(1, scores[:, -1].argmax(dim=-1, keepdim=True))[:, 0]
    return scores[:, :-1] + logprobs.logsumexp(dim=-1)[:, None, None], best


@torch.inference_mode()
def replay(
    drafter: Drafter,
    ids: Tensor,  # [T] prompt and answer
    prompt_length: int,
    features: Tensor | None,  # [T - 1, F]
    blocks: Iterable[Block],
    *,
    chunk: int,
    candidates: int = 0,
) -> Replay:
    """Accepted lengths of a bound drafter that can be replayed, for every block.

    `chunk` anchors run at a time. Plans that show the drafter the same block share its drafts:
    fewer verified slots accept no more than they hold. With `candidates`, the number to keep of
    each slot, the trained block's marginals come along; without, the narrowest block is drafted
    from all anchors, wider ones only where the blocks' cycles go. An answer of one token has no
    anchor.
    """
    anchors = torch.arange(prompt_length, ids.shape[0] - 1, device=ids.device)
    wanted = list(dict.fromkeys(blocks))
    found: list[Marginals] = []

    def drafted(places: Tensor, width: int) -> Tensor:
        """Accepted lengths at some anchors, by place; marginals of the trained block on the way."""
        parts = []
        for some in anchors[places.to(anchors.device)].split(chunk):
            assert isinstance(drafter, Replayable)
            proposals = drafter.replay(ids, features, some, width)
            labels, known = slot_labels(ids, some, width)
            if candidates and width == drafter.trained_block_size:
                shown, accepted = marginals(proposals, labels, known, candidates)
                found.append(shown)
            else:
                accepted = accepted_lengths(proposals, labels, known)
            parts.append(accepted.cpu())
        return torch.cat(parts)

    by_width: dict[int, list[Block]] = {}
    if candidates and drafter.trained_block_size is not None:
        by_width[drafter.trained_block_size] = []
    for block in wanted:
        if block.verified > 1:
            by_width.setdefault(block.drafted, []).append(block)
    everywhere = torch.arange(len(anchors))
    lengths_of = {block: torch.zeros(len(anchors), dtype=torch.int16) for block in wanted}
    likely = torch.zeros(len(anchors), dtype=torch.int16)
    for width, sharing in sorted(by_width.items()) if len(anchors) else ():
        if candidates:
            lengths = drafted(everywhere, width)
        else:
            lengths = _where_visited(drafted, width, sharing, likely)
            likely = torch.where(lengths < 0, likely, lengths)
        for block in sharing:
            lengths_of[block] = lengths.clamp_max(block.verified - 1)
    return Replay(lengths_of, _joined(found))


def _where_visited(
    drafted: Callable[[Tensor, int], Tensor], width: int, blocks: Sequence[Block], likely: Tensor
) -> Tensor:
    """Accepted lengths [A] at the anchors that the blocks' walks visit, -1 elsewhere.

    Where a walk goes is not known before its drafts are. So it is walked with the `likely` lengths
    (another width's), what it visited is drafted, and again until it meets no guess.
    """
    lengths = torch.full_like(likely, -1)
    while True:
        guessed = torch.where(lengths < 0, likely.clamp_max(width - 1), lengths)
        walks = [visited(guessed.clamp_max(block.verified - 1).tolist()) for block in blocks]
        missing = torch.tensor(sorted(set(chain(*walks))), dtype=torch.long)
        missing = missing[lengths[missing] < 0]
        if not len(missing):
            return lengths
        lengths[missing] = drafted(missing, width)


@torch.inference_mode()
def decided(policy: Policy, replay: Replay, answered: KnownAnswer) -> Trace:
    """The trace, without times, that decoding with a bound policy would have left.

    The policy is asked cycle by cycle, as in the decode loop; drafts come from the replay, and the
    answer is the verdict. Past the answer's end a verdict knows nothing, so the last one may be
    shorter than decoding's. Raises UserError for a replay that kept fewer candidates than the
    policy reads.
    """
    tokens, n_anchors = answered.tokens, len(answered.tokens) - 1
    trace = Trace(tokens=tokens, stop_reason=answered.stop_reason)
    if n_anchors < 1:
        return trace
    drafts = _Drafts(policy, replay, answered)
    prompt, anchors = torch.tensor(answered.prompt_ids), torch.tensor(tokens)
    prefill = Forward(answered.prefill_logits[None], None, answered.prefill_hidden[None])
    place, start = 0, len(prompt)
    view = View(prompt, anchors[:1], start, None, prefill, answered.temperature)
    policy.start(view)
    while place < n_anchors:
        block = policy.block(view)
        draft = drafts.of(block.drafted, place)
        n_drafted = draft.tokens.shape[0]
        if block.verified > 1:
            draft = policy.next(draft, view)
        path = known_path(draft, tokens[place + 1 :])
        committed = min(len(path) + 1, n_anchors - place)
        trace.count(n_drafted, draft, path, committed)
        place += committed
        anchor = anchors[place : place + 1]
        policy.observe(Verdict(tokens[place - committed + 1 : place + 1], anchor, None, path))
        view = replace(view, anchor=anchor, position=start + place)
    return trace


class _Drafts:
    """The drafts of one answer's anchors, as far as a replay kept them."""

    def __init__(self, policy: Policy, replay: Replay, answered: KnownAnswer) -> None:
        self.answer, self.marginals = answered.tokens, replay.marginals
        self.lengths: dict[int, list[int]] = {}  # accepted, of the widest block with these drafts
        for block in sorted(replay.accepted, key=lambda each: each.verified):
            self.lengths[block.drafted] = replay.accepted[block].tolist()
        needed = min(getattr(policy, "candidates", 0), answered.prefill_logits.shape[-1])
        kept = 0 if replay.marginals is None else replay.marginals.top_tokens.shape[-1]
        # Of a path head's candidates every policy sees all, and no others.
        scored = replay.marginals is not None and replay.marginals.after is not None
        if kept < needed and not scored:
            raise UserError(
                f"policy {policy.name}: it reads {needed} candidates per slot, the replay kept "
                f"{kept}: sweep again"
            )

    def of(self, drafted: int, place: int) -> Draft:
        """The draft of a block of `drafted` slots. Of a chain only the accepted tokens are known:
        the others are -1, which no token equals.
        """
        if drafted == 1:
            return Draft(torch.empty(0, dtype=torch.int64))
        found = self.marginals
        trained = found is not None and found.rank.shape[1] == drafted - 1
        if drafted in self.lengths:
            accepted = self.lengths[drafted][place]
            assert accepted >= 0, "a replay without drafts at an anchor that this walk visits"
            right = self.answer[place + 1 : place + 1 + accepted]
            tokens = torch.tensor([*right, *[-1] * (drafted - 1 - len(right))])
        else:
            assert found is not None, "a replay without marginals"
            assert trained, "a replay without drafts of this width"
            best = known_candidates(found, place)
            tokens = torch.tensor(
                [best.tokens[s][rank] for s, (rank, _) in enumerate(best.chain())]
            )
        if found is None or not trained:
            return Draft(tokens)
        return Draft(tokens, known=known_candidates(found, place))


def known_candidates(found: Marginals, place: int) -> Candidates:
    """The candidates that a replay kept of one anchor; of a path head's, those alone."""
    top, logprobs = found.top_tokens[place], found.top_logprobs[place]
    if found.after is None:
        return Candidates(top.tolist(), logprobs.tolist())
    after = found.after[place]
    n = after.shape[-1]
    return Candidates(top[:, :n].tolist(), logprobs[:, :n].tolist(), after.tolist())


def known_path(draft: Draft, following: Sequence[int]) -> list[int]:
    """Nodes of a draft, from 1 on, that hold the tokens which follow the anchor."""
    proposed = draft.tokens.tolist()
    parents = range(len(proposed)) if draft.parents is None else draft.parents
    children: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(proposed, parents, strict=True), start=1):
        children.setdefault((parent, token), node)
    path: list[int] = []
    node = 0
    for token in following:
        if (after := children.get((node, token))) is None:
            break
        path.append(node := after)
    return path


def _joined(parts: Sequence[Marginals]) -> Marginals | None:
    if not parts:
        return None
    after = [part.after for part in parts if part.after is not None]
    return Marginals(
        torch.cat([part.rank for part in parts]).cpu(),
        torch.cat([part.top_tokens for part in parts]).cpu(),
        torch.cat([part.top_logprobs for part in parts]).cpu(),
        torch.cat(after).cpu() if len(after) else None,
    )


def anchors_per_chunk(drafter: Drafter, target: Target, n_tokens: int, budget: int) -> int:
    """Anchors whose drafts fit into `budget` bytes, at least one.

    Counted per anchor: the logits of one slot in the target's dtype and in float32, the attention
    scores of a block over `n_tokens` context positions, and a layer's states.
    """
    slots = (drafter.trained_block_size or 1) * 2
    heads, width = target.config.num_attention_heads, target.config.hidden_size
    per_slot = 4 * heads * n_tokens + 16 * width
    per_anchor = 12 * target.embed_rows + 4 * slots * per_slot
    return max(1, budget // per_anchor)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device: of the GPU, or of this machine's main memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
