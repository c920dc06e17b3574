"""Path heads: the published formulas, the laws under them, and what their files refuse."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import PROMPT, VOCAB, plain, sampler, tiny_target, with_stops
from test_law import BUDGET, POLICIES, bound_methods
from test_replay import compare, known_answer
from test_tree_policy import paths_of
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.anchors import TOP
from blockpilot.decoding.answers import answer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.protocols import ReplayablePolicy
from blockpilot.decoding.replay import decided, replay
from blockpilot.decoding.types import Candidates, Draft, View
from blockpilot.decoding.verify import verify
from blockpilot.drafters.dflash import DFlashDrafter, shortlist
from blockpilot.drafters.path_head import (
    TOP_K,
    PathHead,
    PathHeadConfig,
    drafter_digest,
    new_path_head,
    random_path_head,
    save_path_head,
)
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.policies.tree import best_first, paying_nodes
from blockpilot.records.replays import Text, read_replay, write_replay
from blockpilot.records.schema import PER_CYCLE

WIDTH = 32  # of the tiny target


def headed(**keys: Any) -> DFlashDrafter:
    """A random drafter with a random head."""
    given = {"checkpoint": "random", "ignore_keys": [], "head": "random", **keys}
    return DFlashDrafter(**given)


def drawn_head(kind: str, rank: int = 5, seed: int = 0) -> PathHead:
    """A head with weights of size 1."""
    head = new_path_head(PathHeadConfig(kind, rank, WIDTH, VOCAB, TOP_K, None))
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator))
    return head.requires_grad_(False)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- the formulas --------------------------------------------------------------------------------


def by_formula(head: PathHead, hidden: Tensor, before: int, token: int) -> float:
    """The published formula of one pair, term by term."""
    state = {key.split(".", 1)[1]: value for key, value in head.state_dict().items()}
    if head.config.kind == "markov":
        return float(state["markov_w2.weight"][token] @ state["markov_w1.weight"][before])
    projected = state["hidden_projection.weight"] @ hidden
    parts = state["predecessor_codebook"][before] * projected * state["successor_codebook"][token]
    return float(parts.sum())


@pytest.mark.parametrize("kind", ["selector", "markov"])
def test_a_head_scores_pairs_by_the_published_formula(kind: str) -> None:
    head, hidden = drawn_head(kind), draw(2, WIDTH)
    before, tokens = torch.tensor([[3, 1], [7, 7]]), torch.tensor([[5, 8, 0], [9, 2, 60]])
    bias = head(hidden, before, tokens)
    assert bias.shape == (2, 2, 3)
    for slot, j, k in itertools.product(range(2), range(2), range(3)):
        wanted = by_formula(head, hidden[slot], int(before[slot, j]), int(tokens[slot, k]))
        assert float(bias[slot, j, k]) == pytest.approx(wanted, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("kind", ["selector", "markov"])
def test_the_chain_takes_the_best_token_behind_the_one_before(kind: str) -> None:
    """Slot by slot, as the published code runs: no table of pairs."""
    head, hidden, logits = drawn_head(kind), draw(6, WIDTH), 3 * draw(6, VOCAB, seed=1)
    found = shortlist(head, hidden, logits, torch.tensor(11))
    best = Draft(torch.zeros(6), logits, shortlist=found).candidates(3)
    before, differs = 11, False
    for slot, (rank, logprob) in enumerate(best.chain()):
        top = logits[slot].topk(TOP_K).indices.tolist()
        scores = [logits[slot, t] + by_formula(head, hidden[slot], before, t) for t in top]
        wanted = torch.tensor(scores)
        assert best.tokens[slot] == top, "all candidates of the head, whatever is asked for"
        assert rank == int(wanted.argmax())
        mass = logits[slot].softmax(-1)[top].sum().log()
        assert logprob == pytest.approx(float(wanted.log_softmax(-1)[rank] + mass), abs=1e-4)
        before, differs = top[rank], differs or rank > 0
    assert differs, "else any head would do"


# --- trees ---------------------------------------------------------------------------------------


def drawn_candidates(slots: int, n: int, seed: int) -> Candidates:
    """Conditioned log-probabilities that sum to less than 1 behind every candidate."""
    after = (draw(slots, n, n + 1, seed=seed) * 2).log_softmax(-1)[..., :n].tolist()
    tokens = [list(range(n))] * slots
    return Candidates(tokens, draw(slots, n).tolist(), after)


def score(path: tuple[int, ...], best: Candidates) -> float:
    before = (0, *path)
    return math.exp(sum(best.row(slot, before[slot])[rank] for slot, rank in enumerate(path)))


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_on_conditioned_scores_is_the_best_of_its_size(seed: int) -> None:
    best = drawn_candidates(3, 3, seed)
    everything = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    every_score = sorted((score(path, best) for path in everything), reverse=True)
    tree = best_first(best.logprobs, 20, best.after)
    scores = [score(path, best) for path in paths_of(tree)]
    # A node scores no more than its parent, so the best nodes are a tree.
    assert scores == pytest.approx(every_score[:20])
    assert best_first(best.logprobs, 7, best.after) == tree[:7]
    rates = [(1 + sum(scores[:n])) / (1 + n / 9) for n in range(1, 21)]
    seconds = [1 + n / 9 for n in range(1, 21)]
    assert paying_nodes(tree, best.logprobs, seconds, best.after) == 1 + rates.index(max(rates))


def test_a_head_that_adds_nothing_leaves_chain_and_tree_as_they_are() -> None:
    logits = 3 * draw(5, VOCAB)
    head = new_path_head(PathHeadConfig("selector", 4, WIDTH, VOCAB, TOP_K, None))
    head.requires_grad_(False)
    found = shortlist(head, draw(5, WIDTH), logits, torch.tensor(1))
    headed = Draft(logits.argmax(-1), logits, shortlist=found).candidates(16)
    bare = Draft(logits.argmax(-1), logits).candidates(16)
    assert [rank for rank, _ in headed.chain()] == [0] * 5
    assert best_first(headed.logprobs, 15, headed.after) == best_first(bare.logprobs, 15)


# --- the laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.stem)
def test_same_tokens_as_plain_with_a_head(policy: Path) -> None:
    target = tiny_target("qwen3")
    drafter: Any = headed()
    for temperature in (0.0, 1.0):
        wanted = plain(target, BUDGET, sampler(temperature)).tokens
        for name, method in bound_methods(policy, policy, target, known=drafter):
            trace = decode(target, method, PROMPT, sampler(temperature), BUDGET)
            assert trace.tokens == wanted, (name, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_equals_decode_with_a_head(temperature: float) -> None:
    target = with_stops(tiny_target("mistral"), 3, 33)
    drafter: Any = headed()
    drafter.bind(target)
    compare(target, drafter, temperature, chunk=7)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.stem)
def test_replay_equals_decode_for_every_policy_with_a_head(policy: Path, tmp_path: Path) -> None:
    """Also of a replay that was written and read again."""
    target = with_stops(tiny_target(), 3)
    drafter: Any = headed()
    drafter.bind(target)
    choose = sampler(1.0)
    prompt = [*PROMPT, *(2 * plain(target, 12, choose).tokens), *PROMPT]
    one = answer(target, [prompt], choose, 20, drafter.feature_layers)[0]
    ids = torch.tensor([*prompt, *one.tokens])
    for name, method in bound_methods(policy, policy, target, known=drafter):
        if not isinstance(method.policy, ReplayablePolicy):
            continue
        blocks = method.policy.replay_blocks()
        found = replay(drafter, ids, len(prompt), one.features, blocks, chunk=7, candidates=TOP)
        trace = decided(method.policy, found, known_answer(prompt, one, 1.0))
        decoded = decode(target, method, prompt, choose, 20)
        for part in ("tokens", "stop_reason", *PER_CYCLE):
            assert getattr(trace, part) == getattr(decoded, part), (name, part)
        if found.marginals is not None:
            assert found.marginals.after is not None
            file = tmp_path / "replay.safetensors"
            settings: Any = type("Settings", (), {"prompt_id": "p"})
            write_replay(file, settings, Text(ids.tolist(), len(prompt)), found, None)
            again = read_replay(file, "p")[1].marginals
            assert again is not None
            assert again.after is not None
            assert torch.equal(again.after, found.marginals.after.half())


def test_a_head_changes_what_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the laws above would hold for a head that nothing reads."""
    target = tiny_target()
    drafts: list[list[int]] = []

    def spying(target, cache, view: View, draft: Draft, choose):  # type: ignore[no-untyped-def]
        drafts.append(draft.tokens.tolist())
        return verify(target, cache, view, draft, choose)

    monkeypatch.setattr("blockpilot.decoding.loop.verify", spying)
    for head in (None, "random"):
        method = Method(headed(head=head), FixedPolicy(block_size=8, block_mode="draft"))
        decode(target, method.bind(target), PROMPT, max_new_tokens=2)
    assert len(drafts) == 2
    assert drafts[0] != drafts[1]


# --- files ---------------------------------------------------------------------------------------


def saved(folder: Path, **keys: Any) -> Path:
    """A head's folder, with keys of its config.json changed; None takes one away."""
    save_path_head(drawn_head("selector"), folder)
    raw = json.loads((folder / "config.json").read_text()) | keys
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("kind", ["selector", "markov"])
def test_a_saved_head_decodes_as_it_did(kind: str, tmp_path: Path) -> None:
    target = tiny_target()
    head = drawn_head(kind)
    save_path_head(head, tmp_path)
    drafter = headed(head=str(tmp_path))
    drafter.bind(target)
    loaded = drafter._head
    assert loaded is not None
    assert loaded.config == head.config
    for key, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor.to(torch.bfloat16).double())


def test_rows_of_another_head_are_of_another_drafter(tmp_path: Path) -> None:
    seen, shapes = set(), set()
    for number, head in enumerate((None, "random", "selector", "markov")):
        place = head
        if head in ("selector", "markov"):
            place = str(tmp_path / str(number))
            save_path_head(drawn_head(head), Path(place))
        drafter = headed(head=place)
        drafter.bind(tiny_target())
        seen.add(drafter.fingerprint)
        shapes.add(drafter.shape)
    assert len(seen) == 4
    assert len(shapes) == 4, "what a draft costs depends on the head's size"


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    def told(**keys: Any) -> str:
        with pytest.raises(UserError) as caught:
            headed(head=str(saved(tmp_path, **keys))).bind(tiny_target())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "hidden_size=64, the target has 32" in told(hidden_size=64)
    assert "selector_rank or markov_rank, one of the two" in told(dflash_config=None)
    assert "selector_rank or markov_rank, one of the two" in told(markov_rank=3)
    assert "markov_head_type=rnn" in told(markov_head_type="rnn")
    assert "conv_kernel_size" in told(conv_kernel_size=2)
    assert "rank=0, allowed are >= 1" in told(dflash_config={"selector_rank": 0})
    wrong = told(dflash_config={"selector_rank": 6})
    assert "predecessor_codebook has shape [61, 5], its config.json means [61, 6]" in wrong
    assert "was trained on the drafter with digest other" in told(drafter_digest="other")


def test_a_head_knows_its_drafter_in_every_dtype(tmp_path: Path) -> None:
    drafter = headed(head=None)
    drafter.bind(tiny_target())
    digest = drafter_digest(drafter.network)
    for dtype in (torch.float64, torch.float32):
        headed(head=str(saved(tmp_path, drafter_digest=digest))).bind(tiny_target(dtype=dtype))


def test_a_random_head_is_the_same_every_time() -> None:
    one, other = (random_path_head(tiny_target()).state_dict() for _ in range(2))
    assert all(torch.equal(one[key], other[key]) for key in one)
