"""The methods of a sweep: plain decoding, every block size, every tree, and further policies."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from hydra.utils import instantiate

from blockpilot.app.config import SweepConfig
from blockpilot.base.errors import UserError
from blockpilot.base.launch import world
from blockpilot.decoding.loop import Method
from blockpilot.decoding.protocols import Adaptive, Drafter
from blockpilot.decoding.target import Target
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.policies.tree import TreePolicy
from blockpilot.records.schema import PLAIN


def sweep_methods(cfg: SweepConfig, drafter: Drafter, target: Target) -> dict[str, Method]:
    """Plain decoding, the drafter at every size, with every tree and under further policies.

    All are bound to the target.

    Sizes are B-k..B+k around the trained block size B, clipped to what is possible, and those
    listed. Size 1 is plain decoding.
    """
    plain = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode=cfg.block_mode))
    methods = {PLAIN: plain}
    trained = drafter.trained_block_size
    sizes = set(cfg.sizes)
    if trained is not None:
        widest = trained if cfg.block_mode == "verify" else trained + cfg.radius
        sizes |= set(range(max(1, trained - cfg.radius), widest + 1))
    elif sizes - {1}:
        raise UserError(f"sizes={list(cfg.sizes)}: drafter {drafter.name} has no block size but 1")
    for size in sorted(sizes - {1}):
        policy = FixedPolicy(block_size=size, block_mode=cfg.block_mode)
        methods[f"{drafter.name}{size}"] = Method(drafter, policy)
    for name, tree in tree_policies(cfg).items():
        methods[name] = Method(drafter, tree)
    path = cfg.policy.path
    if path and all(each.get("path") != path for each in cfg.methods.values()):
        raise UserError(f"policy.path={path}: no method reads it; add method=[blockpilot]")
    for name, each in cfg.methods.items():
        if name in methods:
            raise UserError(f"methods: {name} is a method of this sweep already")
        parts = instantiate(each, _convert_="all")
        if isinstance(parts, dict):
            brought, policy = parts["drafter"], parts["policy"]
            if cfg.mode == "replay":
                raise UserError(
                    f"method {name} brings its own drafter, {brought.name}: a replay is of one; "
                    "set mode=decode"
                )
        else:
            brought, policy = drafter, parts
        methods[str(name)] = Method(brought, policy)
    for method in methods.values():
        method.bind(target)
    check_learners(methods)
    return methods


def learners(methods: Mapping[str, Method]) -> dict[str, Adaptive]:
    """Drafters that learn from the prompts of the sweep, by the name of their method."""
    return {
        name: method.drafter
        for name, method in methods.items()
        if isinstance(method.drafter, Adaptive) and method.drafter.updates is not None
    }


def check_learners(methods: Mapping[str, Method]) -> None:
    """Refuse what would mix up what a drafter learns (UserError): methods that share it, ranks."""
    found = learners(methods)
    if found and (size := world().size) > 1:
        raise UserError(f"drafter.adapt: it learns in one process; this launch has {size}")
    names = list(found)
    for name, later in combinations(names, 2):
        if found[name] is found[later]:
            raise UserError(
                f"drafter.adapt: methods {name} and {later} would teach the same drafter; set "
                "radius=0, sizes=[] and leave out policies that use the sweep's own"
            )


def tree_policies(cfg: SweepConfig) -> dict[str, TreePolicy]:
    """DDTree with every number of nodes in `tree_nodes`, by the name of the method."""
    return {
        f"tree{nodes}": TreePolicy(nodes=nodes, cost=None, fit=None, online=False)
        for nodes in cfg.tree_nodes
    }
