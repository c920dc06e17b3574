"""Chain verification: accept proposals while they equal the target's own keyed tokens."""

from __future__ import annotations

import torch

from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.protocols import Choose, TargetModel
from blockpilot.decoding.types import Draft, Verdict, View


def verify_chain(
    target: TargetModel, cache: SlabCache, view: View, draft: Draft, choose: Choose
) -> Verdict:
    """One target forward over [anchor, draft]; one host sync for the whole cycle."""
    ids = torch.cat([view.anchor, draft.tokens])  # [N + 1]
    forward = target.forward(ids, cache, n_logits=ids.shape[0])
    places = torch.arange(ids.shape[0], device=ids.device) + (view.position + 1)
    own = choose(forward.logits, places)  # [N + 1]
    accepted = (own[:-1] == draft.tokens).cumprod(0).sum(dim=0, keepdim=True)
    n_accepted, *tokens = torch.cat([accepted, own]).tolist()
    kept = n_accepted + 1
    cache.rollback(view.position + kept)
    features = None if forward.features is None else forward.features[:kept]
    return Verdict(tokens[:kept], own[n_accepted:kept], features)
