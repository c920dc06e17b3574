"""The SpecBlock drafter against a slow reference: states, ranks, trees, and its form on disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import PROMPT, plain, sampler, tiny_target
from reference import reference_features, rms_norm
from reference_specblock import blocks, draft_logits, rank_class, tree
from specblock_kit import TABLE, Exact, Recorded, bound, drafter_of, flat, published, write
from torch import Tensor

from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.native.compiler import compiler
from blockpilot.decoding.native.target import NativeTarget
from blockpilot.decoding.types import Draft, View
from blockpilot.decoding.verify import accepted_path
from blockpilot.drafters.specblock import random_specblock
from blockpilot.drafters.specblock_net import SpecBlockConfig, SpecBlockNetwork, rank_features
from blockpilot.drafters.specblock_tree import Slot, SpecBlockTree, n_offered
from blockpilot.policies.fixed import FixedPolicy

BUDGET = 10
LAYERS = (1, 1, 0)  # of a target of four


# --- the network -------------------------------------------------------------------------------


class Case:
    """A text with features, and blocks rolled out behind some of its tokens."""

    def __init__(self, dtype: torch.dtype, **changed: Tensor) -> None:
        self.anchors, self.continued = [2, 5, 11], [[2, 4], [1, 1], [4, 3]]
        state, raw = published()
        target = tiny_target()
        self.config = flat(raw)
        self.state = {**state, **changed}
        self.weights = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in self.state.items()
        }
        kind = Exact if dtype == torch.float64 else SpecBlockNetwork
        self.network = kind(SpecBlockConfig.parse(raw, "x", 4))
        self.network.load_state_dict(self.state)
        self.network.to(dtype)
        self.embedding = target.model.get_input_embeddings().weight.detach()
        generator = torch.Generator().manual_seed(8)
        self.ids = torch.randint(0, 61, (13,), generator=generator).tolist()
        self.features = reference_features(target.model, self.ids, LAYERS)
        # Tokens that the blocks read behind the kept slots; any, for they are taught.
        self.read = torch.randint(0, 61, (3, 2), generator=generator)
        self.dtype = dtype

    @torch.no_grad()
    def made(self, network: SpecBlockNetwork | None = None) -> Tensor:
        """Normed states [A, 3, K, D] by the network."""
        rows = torch.tensor(self.ids[1:])
        return (network or self.network)(
            self.features[:-1].to(self.dtype),
            self.embedding[rows].to(self.dtype),
            torch.tensor(self.anchors),
            torch.tensor(self.continued),
            self.embedding[self.read].to(self.dtype),
        )

    @cache  # noqa: B019
    def wanted(self) -> Tensor:
        """The same by the reference, before the norm."""
        found = []
        for row, anchor in enumerate(self.anchors):
            path = list(zip(self.continued[row], self.read[row].tolist(), strict=True))
            given = self.weights, self.config, self.embedding, self.ids, self.features
            found.append(torch.stack(blocks(*given, anchor - 1, path)))
        return torch.stack(found)

    def normed(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weights["norm.weight"], self.config["rms_norm_eps"])


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(torch.float64)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_states_and_logits_of_first_and_later_blocks(
    dtype: torch.dtype, most: float, case: Case
) -> None:
    of_type = Case(dtype)
    made, wanted = of_type.made(), case.normed(case.wanted())
    assert made.shape == (3, 3, 4, 32)
    assert (made.double() - wanted).abs().max() < most
    with torch.no_grad():
        logits = of_type.network.lm_head(made).double()
    reference = wanted @ case.weights["lm_head.weight"].T
    assert (logits - reference).abs().max() / reference.abs().max() < most
    first = draft_logits(case.weights, case.config, case.wanted()[0, 0, 0])
    torch.testing.assert_close(reference[0, 0, 0], first)


def without_shift(case: Case) -> Tensor:
    width = case.config["hidden_size"]
    only_own = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    return Case(torch.float64, **{"shift.weight": only_own}).made()


def one_slot_fewer(case: Case) -> Tensor:
    other = Case(torch.float64)
    other.continued = [[m - 1 or 2 for m in each] for each in case.continued]
    return other.made()


def turned(case: Case, places: Callable[[int, Tensor], Tensor]) -> Tensor:
    """With other positions; `places` is told the number of the block."""

    class Turned(SpecBlockNetwork):
        def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            made.append(positions)
            return super().rope(places(len(made) - 1, positions), dtype)

    made: list[Tensor] = []
    network = Turned(case.network.config)
    network.load_state_dict(case.state)
    return case.made(network.double())


def later_ones_off_by_one(case: Case) -> Tensor:
    # All blocks together could not be told: only differences of positions count.
    return turned(case, lambda block, positions: positions + (block > 0))


def all_slots_at_the_anchor(case: Case) -> Tensor:
    return turned(case, lambda block, positions: positions - torch.arange(4))


@pytest.mark.parametrize(
    ("wrong", "seen_in_the_first"),
    [
        (without_shift, True),
        (one_slot_fewer, False),
        (later_ones_off_by_one, False),
        (all_slots_at_the_anchor, True),
    ],
)
def test_a_wrong_network_would_be_seen(wrong: Any, seen_in_the_first: bool, case: Case) -> None:
    difference = (wrong(case) - case.normed(case.wanted())).abs().amax(dim=(-2, -1))  # [A, 3]
    assert difference[:, 1:].min() > 1e-3
    assert (difference[:, 0].min() > 1e-3) == seen_in_the_first


def test_the_rank_head_reads_what_is_written_down() -> None:
    logits = torch.full((24,), -4.0, dtype=torch.float64)
    logits[[7, 3, 9, 1, 20]] = torch.tensor([3.0, 2.0, 1.5, 1.0, -1.0], dtype=torch.float64)
    normed = torch.tensor([0.5, -2.0], dtype=torch.float64)
    found = rank_features(normed, logits).tolist()
    assert len(found) == 2 + 15
    near = [math.exp(x) for x in (3.0, 2.0, 1.5, 1.0, -1.0)] + 15 * [math.exp(-4.0)]
    total = sum(near)
    assert found[:2] == [0.5, -2.0]
    assert found[2:12] == pytest.approx([math.log(x / total) for x in near[:10]])
    assert found[12:15] == [1.0, 1.5, 4.0]  # the second, third and fifth
    assert found[15] == pytest.approx(near[0] / (total + 4 * math.exp(-4.0)))  # of all 24
    assert found[16] == pytest.approx(-sum(x / total * math.log(x / total) for x in near))


def test_nothing_is_learnt_through_what_the_rank_head_reads() -> None:
    network = random_specblock(tiny_target())
    normed, logits = (torch.randn(3, n, requires_grad=True) for n in (32, 31))
    network.rank_head(normed, logits).sum().backward()
    assert normed.grad is None
    assert logits.grad is None
    assert network.rank_head.inner.weight.grad is not None


def test_classes_are_the_references(case: Case) -> None:
    states = case.wanted()
    normed = case.normed(states)
    with torch.no_grad():
        made = case.network.rank_head(normed, normed @ case.weights["lm_head.weight"].T)
    wanted = [rank_class(case.weights, case.config, each) for each in states.flatten(0, 2)]
    assert made.argmax(dim=-1).flatten().tolist() == wanted
    assert len(set(wanted)) > 1, "else any head would do"


# --- the tree ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "probability", "by_class", "offered"),
    [
        (0, 0.95, 0, 3),
        (0, 0.9, 10, 3),
        (0, 0.8, 0, 5),
        (0, 0.6, 2, 8),
        (0, 0.59, 2, 10),
        (1, 0.59, 4, 4),
        (1, 0.85, 4, 3),
        (2, 0.85, 2, 2),
        (3, 0.95, 10, 2),
        (3, 0.99, 0, 0),
    ],
)
def test_what_a_slot_offers(slot: int, probability: float, by_class: int, offered: int) -> None:
    assert n_offered(slot, probability, by_class) == offered


def test_a_tree_by_hand() -> None:
    tree = SpecBlockTree()
    block = [
        Slot([10, 11, 12], [-0.5, -1.0, -3.0], 2),
        Slot([20, 21], [-0.25, -2.0], 0),
        Slot([30, 31], [-0.25, -4.0], 1),
    ]
    endings = tree.add(0, 0, 0.0, block)
    # Slot 1 offers nothing: the chain goes on, no block begins there. The last slot ends it.
    made = [(node.token, node.score, node.parent) for node in tree.nodes[1:]]
    assert made == [(10, -0.5, 0), (11, -1.0, 0), (20, -0.75, 1), (30, -1.0, 3)]
    assert [(each.node, each.slot) for each in endings] == [(1, 0), (2, 0), (4, 2)]
    assert tree.best(3) == [1, 2, 3], "of the equal ones the earlier"
    # Full at -1.0: behind nodes that score no more nothing can come that is better.
    assert [each.node for each in tree.hopeful(endings, 3)] == [1]
    assert tree.hopeful(endings, 9) == endings
    # A block behind token 10 proposes 20 as well: one node, and the better score counts.
    more = tree.add(1, 1, -0.5, [Slot([20, 22], [-0.125, -0.5], 2)])
    assert tree.nodes[3].score == -0.625
    assert [tree.nodes[each.node].token for each in more] == [20, 22]
    assert tree.nodes[more[1].node].parent == 1
    assert len(tree.nodes) == 6


@pytest.mark.parametrize(
    ("n_blocks", "table", "size"),
    [(2, TABLE, 12), (1, TABLE, 30), (2, [2], 40), (1, [1], 5), (3, [1], 16), (2, TABLE, 2)],
)
def test_its_trees_are_the_references(
    n_blocks: int, table: list[int], size: int, tmp_path: Path
) -> None:
    """Cached and cut down while it grows, against every block that may begin, from the start."""
    target, (state, raw) = tiny_target(), published()
    drafter = drafter_of(write(tmp_path, state, raw), blocks=n_blocks, alternatives=table)
    trace = decode(target, bound(drafter, size), PROMPT, sampler(1.0), BUDGET)
    text = [*PROMPT, *plain(target, BUDGET + size, sampler(1.0)).tokens]
    assert [*PROMPT, *trace.tokens] == text[: len(PROMPT) + BUDGET]
    features = reference_features(target.model, text, LAYERS)
    weights = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    embedding = target.model.get_input_embeddings().weight.detach()
    assert len(drafter.drafts) == len(trace.committed) > 3
    asked = list(zip(drafter.drafts, trace.committed, strict=True))
    for (position, draft), committed in asked[1:2] if table == TABLE else asked[:3]:
        wanted = tree(
            *(weights, flat(raw), embedding, text[: position + 1], features[:position]),
            *(n_blocks, table, size - 1),
        )
        parents = list(draft.parents or range(len(draft.tokens)))
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(draft.tokens.tolist(), parents, strict=True):
            paths.append((*paths[parent], token))
        assert sorted(paths[1:]) == sorted(wanted)
        assert (draft.parents is None) == (parents == list(range(len(parents))))
        chosen = [text[position + 1 + len(path)] for path in paths]
        accepted = accepted_path(chosen, [0, *draft.tokens.tolist()], parents)
        assert committed == min(len(accepted), len(PROMPT) + BUDGET - 1 - position)
    later = [rows for rows in drafter.rows[2:] if rows > 1]
    if table == TABLE and n_blocks > 1 and size > 2:
        assert max(later) < size, "no more blocks than nodes that are wanted"


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_the_kernels_propose_what_torch_does(tmp_path: Path) -> None:
    folder, proposed = write(tmp_path, *published()), []
    native = NativeTarget(tiny_target())
    native.stop_ids = frozenset()
    for target in (tiny_target(), native):
        drafter = drafter_of(folder, alternatives=[2])
        method = Method(drafter, FixedPolicy(block_size=16, block_mode="draft")).bind(target)
        decode(target, method, PROMPT, sampler(1.0), 30)
        proposed.append([(p, each.tokens.tolist(), each.parents) for p, each in drafter.drafts])
        assert 4 < max(drafter.rows) * 4 <= 64, "else no kernel was asked"
    assert proposed[0] == proposed[1]


def test_it_needs_no_second_block_for_one_token(tmp_path: Path) -> None:
    drafter = drafter_of(write(tmp_path, *published()))
    trace = decode(tiny_target(), bound(drafter, 2), PROMPT, sampler(1.0), BUDGET)
    assert sum(drafter.rows) == len(PROMPT) + sum(trace.committed[:-1])


def test_more_of_a_tree_accepts_no_less(tmp_path: Path) -> None:
    folder = write(tmp_path, *published())
    cycles = []
    for size in (2, 6, 40):
        trace = decode(tiny_target(), bound(drafter_of(folder), size), PROMPT, sampler(1.0), 60)
        assert max(trace.verified) <= size
        cycles.append(len(trace.committed))
    assert cycles[0] > cycles[2], "else a tree would be worth nothing"


def test_a_tree_larger_than_the_room_left_for_it(tmp_path: Path) -> None:
    """Its rows are counted as it grows; the cache follows, and keeps what it held."""

    class Spare(Recorded):
        def start(self, view: View, capacity: int) -> None:
            super().start(view, capacity * spare)
            held.append(self._slab.shape[3])

        def draft(self, view: View, n_slots: int) -> Draft:
            made = super().draft(view, n_slots)
            held.append(self._slab.shape[3])
            return made

    folder, proposed, held = write(tmp_path, *published()), [], list[int]()
    for spare in (1, 20):
        drafter = Spare(
            checkpoint=str(folder),
            ignore_keys=[],
            blocks=4,
            alternatives=[5],
            adapt=None,
            block_size=40,
        )
        decode(tiny_target(), bound(drafter, 40), PROMPT, sampler(1.0), BUDGET)
        proposed.append([(each.tokens.tolist(), each.parents) for _, each in drafter.drafts])
        assert (len(set(held)) > 1) == (spare == 1)
        held.clear()
    assert proposed[0] == proposed[1]
