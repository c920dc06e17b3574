"""Verification of a draft, chain or tree: keep what equals the target's own keyed tokens.

A chain is a tree with one branch; it needs no mask and keeps the cache's first positions, so that
path is taken where the draft has no parents.

Letters: N proposed tokens; node 0 is the anchor, node i the i-th proposed token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.protocols import Choose, TargetModel
from blockpilot.decoding.types import Branches, Draft, Verdict, View


def verify(
    target: TargetModel, cache: SlabCache, view: View, draft: Draft, choose: Choose
) -> Verdict:
    """One target forward over [anchor, draft]; one host sync for the whole cycle."""
    if draft.parents is not None:
        return _verify_tree(target, cache, view, draft, draft.parents, choose)
    ids = torch.cat([view.anchor, draft.tokens])  # [N + 1]
    forward = target.forward(ids, cache, n_logits=ids.shape[0])
    places = torch.arange(ids.shape[0], device=ids.device) + (view.position + 1)
    own = choose(forward.logits, places)  # [N + 1]
    accepted = (own[:-1] == draft.tokens).cumprod(0).sum(dim=0, keepdim=True)
    n_accepted, *tokens = torch.cat([accepted, own]).tolist()
    kept = n_accepted + 1
    cache.rollback(view.position + kept)
    features = None if forward.features is None else forward.features[:kept]
    return Verdict(tokens[:kept], own[n_accepted:kept], features, range(1, kept))


def _verify_tree(
    target: TargetModel,
    cache: SlabCache,
    view: View,
    draft: Draft,
    parents: Sequence[int],
    choose: Choose,
) -> Verdict:
    ids = torch.cat([view.anchor, draft.tokens])  # [N + 1]
    branches = Branches(parents, ids.device)
    forward = target.forward(ids, cache, n_logits=ids.shape[0], branches=branches)
    own = choose(forward.logits, branches.depths + (view.position + 1))  # [N + 1]
    chosen, proposed = torch.stack([own, ids]).tolist()
    path = accepted_path(chosen, proposed, parents)
    index = torch.tensor(path, device=ids.device)
    if path == list(range(len(path))):
        cache.rollback(view.position + len(path))
    else:
        cache.compact(view.position, index)
    features = None if forward.features is None else forward.features[index]
    return Verdict([chosen[node] for node in path], own[path[-1] :][:1], features, path[1:])


def accepted_path(
    chosen: Sequence[int], proposed: Sequence[int], parents: Sequence[int]
) -> list[int]:
    """Nodes from the anchor down while the target's token is among the children.

    `chosen` [N + 1] are the target's tokens after each node, `proposed` [N + 1] the nodes' own.
    """
    children: dict[tuple[int, int], int] = {}
    for node, parent in enumerate(parents, start=1):
        children.setdefault((parent, proposed[node]), node)
    path = [0]
    while (after := children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(after)
    return path
