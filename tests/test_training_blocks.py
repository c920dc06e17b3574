"""One training step's parts by hand and against slow references: anchors, labels, weights, loss."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoding_kit import VOCAB, tiny_target

from blockpilot.base.errors import UserError
from blockpilot.decoding.replay import slot_labels
from blockpilot.decoding.target import LogitShape
from blockpilot.distill.blocks import (
    decay_weights,
    dpace_weights,
    sample_anchors,
    unused_id,
)
from blockpilot.distill.losses import CandidateHead, cross_entropies, soft_targets
from blockpilot.drafters.dflash_load import new_config
from blockpilot.drafters.dflash_net import DFlashNetwork


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("n_anchors", [1, 4, 100])
@pytest.mark.parametrize("n_response", [2, 3, 12])
def test_anchors_are_distinct_response_tokens_with_a_known_successor(
    n_anchors: int, n_response: int
) -> None:
    prompt, total = 5, 5 + n_response
    seen = set()
    for seed in range(60):
        anchors = sample_anchors(prompt, total, n_anchors, generator(seed))
        assert len(anchors) == min(n_anchors, n_response - 1)
        assert anchors.tolist() == sorted(set(anchors.tolist()))
        assert all(prompt <= anchor < total - 1 for anchor in anchors.tolist())
        seen.update(anchors.tolist())
    assert seen == set(range(prompt, total - 1)), "every such token is an anchor now and then"
    again = sample_anchors(prompt, total, n_anchors, generator(59))
    assert torch.equal(again, anchors)


@pytest.mark.parametrize("n_response", [0, 1])
def test_a_response_without_a_successor_has_no_anchor(n_response: int) -> None:
    assert sample_anchors(5, 5 + n_response, 4, generator(0)).tolist() == []


def test_labels_and_known_slots_by_hand() -> None:
    ids = torch.tensor([10, 11, 12, 13, 14, 15])
    labels, known = slot_labels(ids, torch.tensor([1, 3, 4]), block_size=4)
    assert labels[known].tolist() == [12, 13, 14, 14, 15, 15]
    assert known.tolist() == [[True, True, True], [True, True, False], [True, False, False]]


def test_decay_weights_by_formula() -> None:
    weights = decay_weights(7, 4.0)
    wanted = [math.exp(-(slot - 1) / 4.0) for slot in range(1, 8)]
    torch.testing.assert_close(weights, torch.tensor(wanted))


def known_prefixes(lengths: list[int], n_slots: int) -> torch.Tensor:
    return torch.arange(n_slots)[None, :] < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_dpace_weights_against_a_double_loop(smoothing: float) -> None:
    q = torch.rand(3, 6, dtype=torch.float64, generator=generator(0))
    lengths = [6, 4, 1]
    weights = dpace_weights(q, known_prefixes(lengths, 6), smoothing)
    for row, length in enumerate(lengths):
        for j in range(6):
            wanted = 0.0
            for i in range(j, length):
                product = 1.0
                for k in range(i + 1):
                    product *= (1 - smoothing) * float(q[row, k]) + smoothing
                wanted += product
            assert float(weights[row, j]) == pytest.approx(wanted), (row, j)


def test_dpace_is_the_gradient_of_the_expected_accepted_length() -> None:
    """Without smoothing, and slot by slot with respect to the logarithm of q."""
    log_q = torch.rand(4, 5, dtype=torch.float64, generator=generator(1)).log().requires_grad_()
    lengths = [5, 3, 2, 1]
    expected = sum(log_q[row, :length].exp().cumprod(0).sum() for row, length in enumerate(lengths))
    assert isinstance(expected, torch.Tensor)
    (gradient,) = torch.autograd.grad(expected, log_q)
    weights = dpace_weights(log_q.exp(), known_prefixes(lengths, 5), smoothing=0.0)
    torch.testing.assert_close(weights, gradient)
    assert not weights.requires_grad


def test_a_mask_is_an_id_that_no_token_has() -> None:
    """Added tokens may leave a gap, so that the number of tokens is one of their ids."""
    vocabulary = {"a": 0, "b": 1, "<added>": 3}
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary)
    target: Any = SimpleNamespace(name="t", tokenizer=tokenizer, embed_rows=5)
    assert unused_id(target) == 2
    vocabulary["c"] = 2
    assert unused_id(target) == 4
    target.embed_rows = 4
    with pytest.raises(UserError, match="t has no embedding row past its tokenizer's 4 entries"):
        unused_id(target)


def network_of(target_layers: int = 1) -> DFlashNetwork:
    target = tiny_target()
    config = new_config(
        target, n_layers=2, n_target_layers=target_layers, block_size=5, mask_token_id=VOCAB - 1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DFlashNetwork(config).double()


@torch.no_grad()
def test_packed_blocks_equal_one_block_at_a_time() -> None:
    """And no block sees a feature at or behind its anchor, or another block."""
    network = network_of()
    width = network.config.layers.hidden_size
    features = torch.randn(20, width, dtype=torch.float64, generator=generator(3))
    anchors = torch.tensor([0, 1, 7, 8, 20])
    blocks = torch.randn(len(anchors), 5, width, dtype=torch.float64, generator=generator(4))
    packed = network(features, blocks, anchors)
    for row, anchor in enumerate(anchors.tolist()):
        alone = network(features[:anchor], blocks[row : row + 1], anchors[row : row + 1])
        torch.testing.assert_close(packed[row], alone[0])
    for first, second in itertools.pairwise(packed):
        assert not torch.allclose(first, second)


def loss_over(head: CandidateHead, hidden: torch.Tensor, labels: torch.Tensor, seed: int):  # type: ignore[no-untyped-def]
    """Cross-entropies and log-partitions over the candidates of one step."""
    candidates = head.draw(generator(seed))
    logits = F.linear(hidden, candidates.weight) + candidates.offset
    rows, offsets = soft_targets(hidden, candidates, candidates.weight, None)
    place = candidates.index[labels]
    hard, _ = cross_entropies(
        hidden, candidates.weight, candidates.offset, place, rows, offsets, None
    )
    return hard, logits.logsumexp(-1)


@pytest.mark.parametrize("n_sampled", [None, 1000])
def test_the_loss_over_all_tokens_is_the_plain_cross_entropy(n_sampled: int | None) -> None:
    weight = torch.randn(40, 8, generator=generator(0))
    hidden = torch.randn(6, 8, generator=generator(1))
    labels = torch.tensor([3, 39, 0, 5, 5, 12])
    head = CandidateHead(weight, labels.unique(), n_sampled, None)
    losses, _ = loss_over(head, hidden, labels, 0)
    torch.testing.assert_close(losses, F.cross_entropy(hidden @ weight.T, labels, reduction="none"))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("n_sampled", [None, 10])
def test_soft_labels_are_the_probabilities_of_the_target(
    n_sampled: int | None, cap: float | None
) -> None:
    weight = torch.randn(40, 8, generator=generator(0))
    hidden, taught = torch.randn(2, 6, 8, generator=generator(1))
    labels = torch.tensor([3, 39, 0, 5, 5, 12])
    candidates = CandidateHead(weight, labels.unique(), n_sampled, cap).draw(generator(2))
    rows, offsets = soft_targets(taught, candidates, candidates.weight, cap)
    hard, soft = cross_entropies(
        *(hidden, candidates.weight, candidates.offset),
        *(candidates.index[labels], rows, offsets, cap),
    )
    shape = LogitShape(cap=cap)
    logits, teacher = (shape(x @ candidates.weight.T) + candidates.offset for x in (hidden, taught))
    wanted = F.cross_entropy(logits, teacher.softmax(dim=-1), reduction="none")
    torch.testing.assert_close(soft, wanted)
    wanted = F.cross_entropy(logits, candidates.index[labels], reduction="none")
    torch.testing.assert_close(hard, wanted)


def test_sampled_candidates_leave_the_partition_function_unbiased() -> None:
    weight = torch.randn(60, 8, dtype=torch.float64, generator=generator(0))
    hidden = torch.randn(5, 8, dtype=torch.float64, generator=generator(1))
    seen = torch.tensor([1, 4, 9, 33])
    labels = torch.tensor([33, 1, 4, 9, 9])
    head = CandidateHead(weight, seen, 20, None)
    logits = hidden @ weight.T
    partitions = []
    for seed in range(600):
        losses, log_partition = loss_over(head, hidden, labels, seed)
        partitions.append(log_partition.exp())
        # The label's own logit is never corrected: only the others' share is estimated.
        own = logits.gather(1, labels[:, None])[:, 0]
        torch.testing.assert_close(log_partition - losses, own, rtol=1e-6, atol=1e-6)
    drawn = torch.stack(partitions)
    error = drawn.std(dim=0) / math.sqrt(len(drawn))
    assert ((drawn.mean(dim=0) - logits.exp().sum(-1)).abs() < 4 * error).all()
    assert (error > 0).all(), "the draws differ"


def test_candidates_are_the_seen_tokens_and_distinct_others() -> None:
    weight = torch.arange(30.0)[:, None]
    seen = torch.tensor([2, 7, 29])
    candidates = CandidateHead(weight, seen, 10, None).draw(generator(0))
    ids = candidates.weight[:, 0].long().tolist()
    assert ids[:3] == seen.tolist()
    assert len(set(ids)) == len(ids) == 13
    assert candidates.index[torch.tensor(ids)].tolist() == list(range(13))
    assert candidates.offset[:3].tolist() == [0, 0, 0]
    assert candidates.offset[3:].tolist() == pytest.approx([math.log(27 / 10)] * 10)
