"""The policies that pick a source per cycle, and what the pilot learns; the laws find them too."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding_kit import bound_dflash, plain, sampler, tiny_target
from omegaconf import OmegaConf

from blockpilot.base.errors import UserError
from blockpilot.base.paths import conf_dir
from blockpilot.costs.curve import CostCurve, CostPoint, cost_settings
from blockpilot.decoding.anchors import KnownAnswer, Replay
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.replay import decided
from blockpilot.decoding.text import IndexedText
from blockpilot.decoding.types import Candidates, Draft, Origin, source_of
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.copying import CopyPolicy
from blockpilot.policies.pilot import (
    LONGEST_COPY,
    NODES,
    SHIPPED,
    Past,
    PilotPolicy,
    best_length,
)
from blockpilot.policies.tree import best_first
from blockpilot.predictor.acceptance import (
    AcceptanceModel,
    Situation,
    copy_features,
    load_acceptance,
    logistic,
    node_features,
    save_acceptance,
    unfitted,
)
from blockpilot.predictor.acceptance_fit import Outcomes, least_squares, logistic_regression


def curve(plain_ms: float = 10, draft_ms: float = 10, position_ms: float = 1) -> CostCurve:
    """Costs that grow by the position."""

    def point(kind: str, size: int, ms: float) -> CostPoint:
        return CostPoint(size, 8, 1, ms / 1e3, *[0.0] * 6, kind=kind)

    sizes = (2, 17, 33)
    points = [point("chain", 1, plain_ms)]
    points += [point("copy", size, plain_ms + position_ms * (size - 1)) for size in sizes]
    points += [
        point("tree", size, plain_ms + draft_ms + position_ms * (size - 1)) for size in sizes
    ]
    return CostCurve({}, {}, points)


def ready(costs: CostCurve, model: AcceptanceModel | None = None) -> PilotPolicy:
    """A pilot with given costs, for a drafter of 8 slots with marginals."""
    policy = PilotPolicy(path=None, cost=None, nodes=16, longest_copy=32)
    policy.ready(8, True, model or unfitted())
    policy.curve = costs
    return policy


def situation(**changes: Any) -> Situation:
    """Nothing special."""
    usual = {"match": 3, "several": False, "agreed": False, "quoted": False, "hits": 2.0}
    rest = {"misses": 1.0, "drafted": 1.0, "temperature": 0.0}
    return Situation(**{**usual, **rest, **changes})


def test_the_length_of_a_copy_is_the_one_worth_most() -> None:
    draw = random.Random(0)
    for _ in range(100):
        chances = [draw.random() for _ in range(8)]
        seconds = [0.01 * (1 + n * draw.random()) for n in range(9)]
        rate = draw.uniform(10, 200)
        worth = []
        for n in range(9):
            expected = sum(math.prod(chances[:j]) for j in range(n + 1))
            worth.append(expected - rate * seconds[n])
        n_best, most = best_length(chances, seconds, rate)
        assert n_best == worth.index(max(worth))
        assert most == pytest.approx(max(worth))
    assert best_length([], [0.02], 50.0) == (0, 0.0), "plain decoding, where nothing can be copied"


def test_without_a_copy_the_pilots_tree_is_the_best_one() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(7, 40, generator=generator)
    best = Draft(torch.zeros(7), logits).candidates(16)
    policy = ready(curve())
    start(policy, [5, 6, 7])
    grown = policy._grown(best)
    wanted = best_first(best.logprobs, 16)
    assert [node.token for node in grown] == [best.tokens[slot][rank] for slot, rank, _ in wanted]
    assert [node.parent for node in grown] == [parent for _, _, parent in wanted]
    assert all(node.origin is Origin.DRAFTER for node in grown)


def test_a_copy_is_grafted_into_the_tree_and_goes_on_behind_the_block() -> None:
    """Copied tokens that the drafter proposes too are there once, and are no copies."""
    policy = ready(curve(), load_acceptance(SHIPPED))
    start(policy, [*range(10, 30), 9, 10, 11])
    copied = policy._copy.tokens
    assert copied[:10] == list(range(12, 22))
    tokens = [[12, 40], [41, 42], [14, 43]]
    grown = policy._grown(Candidates(tokens, [[math.log(0.6), math.log(0.3)]] * 3))
    paths: list[tuple[int, ...]] = [()]
    for node in grown:
        paths.append((*paths[node.parent], node.token))
    assert len(set(paths)) == len(paths)
    origins = dict(zip(paths[1:], (node.origin for node in grown), strict=True))
    assert origins[12,] is Origin.DRAFTER
    assert origins[12, 13] is Origin.PROMPT
    assert origins[12, 13, 14, 15] is Origin.PROMPT, "longer than the block of three"
    for node, path in zip(grown, paths[1:], strict=True):
        if node.parent:
            assert node.chance <= grown[node.parent - 1].chance, path


def start(policy: PilotPolicy, prompt: list[int]) -> None:
    """Begin an answer and look at its first situation."""
    from blockpilot.decoding.types import Forward, View

    nothing = Forward(torch.zeros(1, 61), None, torch.zeros(1, 4))
    ids = torch.tensor(prompt)
    policy.start(View(ids[:-1], ids[-1:], len(prompt) - 1, None, nothing))
    policy._match()


def test_dear_drafts_are_not_made_and_dear_positions_not_copied() -> None:
    target = tiny_target()
    wanted = plain(target, 24).tokens
    prompt = [5, 17, 3, 42, 8]
    kinds = {}
    for name, costs in {
        "dear drafts": curve(draft_ms=1e4),
        "dear positions": curve(position_ms=1e4),
        "cheap drafts": curve(draft_ms=0.0, position_ms=0.0),
    }.items():
        policy = ready(costs)
        policy.bind = lambda target, drafter: None  # type: ignore[method-assign]
        drafter = bound_dflash()
        policy.ready(drafter.trained_block_size or 1, True, unfitted())
        trace = decode(target, Method(drafter, policy), prompt, sampler(), 24)
        assert trace.tokens == wanted
        kinds[name] = (sum(trace.drafted), max(trace.verified))
    assert kinds["dear drafts"][0] == 0
    assert kinds["dear positions"] == (0, 1), "plain decoding"
    assert kinds["cheap drafts"][0] > 0


def test_copies_of_the_prompt_and_of_the_answer_are_told_apart_by_hand() -> None:
    policy = CopyPolicy(min_match=2, length=7, nodes=7)
    policy.bind(tiny_target(), NoDrafter())
    prefill = torch.zeros(61), torch.zeros(4)
    said = [1, 2, 3, 4, 5, 7, 8, 7, 8, 7, 8]
    answered = KnownAnswer([1, 2, 3, 4, 5, 6, 9], said, "budget", 0.0, *prefill)
    trace = decided(policy, Replay({}, None), answered)
    assert trace.committed == [1, 4, 1, 1, 1, 2]
    assert trace.drafted == [0] * 6
    assert trace.copied == [0, 7, 0, 0, 0, 2], "no longer than the text goes on"
    assert trace.verified == [1, 8, 1, 1, 1, 3]
    assert trace.quoted == [0, 3, 0, 0, 0, 0]
    assert trace.repeated == [0, 0, 0, 0, 0, 2]


def test_the_past_judges_a_copy_by_the_committed_tokens_alone() -> None:
    past = Past(1.0, 0.0)
    past.copied([1, 2, 3], [1, 2])
    right = past.hits, past.misses
    assert right[0] > 2.0
    assert right[1] < 1.0 + 1e-9, "no wrong token was seen"
    past.copied([1, 2, 3], [1, 9])
    assert past.misses > right[1]
    before = past.hits, past.misses
    past.copied([], [1, 2])
    assert (past.hits, past.misses) == before, "nothing could be copied"


def test_a_longer_match_is_told_from_a_shorter_one() -> None:
    text = IndexedText(4, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7])
    match = text.match()
    assert match.length == 4
    assert text.agreement(match.places[-1], 32) == 7
    assert text.agreement(match.places[-1], 5) == 5
    text.extend([3])
    assert text.at(5, 3).origins == [Origin.PROMPT] * 3
    assert text.at(15, 3).origins == [Origin.PROMPT, Origin.ANSWER]


def test_fits_find_the_functions_that_made_the_data() -> None:
    generator = np.random.default_rng(0)
    features = np.c_[np.ones(20_000), generator.standard_normal((20_000, 2))]
    weights = np.array([-0.5, 1.5, -1.0])
    hits = generator.random(20_000) < 1 / (1 + np.exp(-features @ weights))
    assert logistic_regression(features, hits.astype(float)) == pytest.approx(weights, abs=0.06)
    values = features @ weights + 0.1 * generator.standard_normal(20_000)
    assert least_squares(features, values) == pytest.approx(weights, abs=0.01)


def test_shuffled_outcomes_teach_only_what_is_usual() -> None:
    outcomes = Outcomes()
    for n in range(4_000):
        each = situation(match=1 + n % 8)
        outcomes.copy.append((copy_features(each, 1), n % 8 >= 4))
        outcomes.draft.append(([1.0, float(n % 8), *[0.0] * 5], float(n % 8)))
        outcomes.node.append((node_features(0.5, n % 2 == 0, 0.5, 0), n % 2 == 0))
    shuffled = outcomes.shuffled(np.random.default_rng(0))
    chances = {}
    for name, each in (("fitted", outcomes), ("shuffled", shuffled)):
        model = each.fit({})
        chances[name] = [model.copy_chances(situation(match=m), 1)[0] for m in (1, 8)]
    assert chances["fitted"][0] < 0.1 < 0.9 < chances["fitted"][1]
    assert chances["shuffled"] == pytest.approx([0.5, 0.5], abs=0.1)


def test_a_chance_is_held_off_certainty() -> None:
    assert 0 < logistic(-1e6) < logistic(0) == 0.5 < logistic(1e6) <= 1
    assert all(math.isfinite(x) for x in node_features(0.0, True, 1.0, 0))


def test_a_model_is_kept_and_a_damaged_one_refused(tmp_path: Path) -> None:
    model = unfitted()
    save_acceptance(model, tmp_path / "new")
    assert load_acceptance(tmp_path / "new") == model
    file = tmp_path / "new" / "acceptance.json"
    held = json.loads(file.read_text())
    file.write_text(json.dumps({**held, "copy": held["copy"][:-1]}))
    with pytest.raises(UserError, match="copy has 11 weights, not 12"):
        load_acceptance(tmp_path / "new")
    file.write_text("{")
    with pytest.raises(UserError, match="no acceptance model"):
        load_acceptance(tmp_path / "new")


def test_a_calibration_is_measured_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path))
    target, drafter = tiny_target(), bound_dflash()
    stop_ids = target.stop_ids
    with caplog.at_level("INFO"):
        found = []
        for _ in range(2):
            policy = PilotPolicy(path=None, cost=None, nodes=15, longest_copy=32)
            Method(drafter, policy).bind(target)
            found.append(policy.curve)
    assert target.stop_ids == stop_ids
    assert found[0] == found[1]
    assert caplog.text.count("s of calibration") == 1
    kinds = {(point.kind, point.block_size) for point in found[0].points}
    assert {("chain", 1), ("copy", 33), ("tree", 16)} <= kinds
    assert all(point.cycle_s > 0 and point.repeats >= 3 for point in found[0].points)
    assert found[0].settings == cost_settings(target, drafter)


def test_a_replay_calibrates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(target, "timed", False)
    policy = PilotPolicy(path=None, cost=None, nodes=15, longest_copy=32)
    with pytest.raises(UserError, match=r"policy.cost=null: a replay calibrates nothing"):
        Method(bound_dflash(), policy).bind(target)


def test_a_pilot_of_another_pair_says_so(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target()
    Method(bound_dflash(), PilotPolicy(path=None, cost=None, nodes=3, longest_copy=4)).bind(target)
    assert "pilot: fitted to target smollm2-135m, this is unnamed" in caplog.text


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"policy.nodes=0: allowed are numbers >= 1"):
        PilotPolicy(path=None, cost=None, nodes=0, longest_copy=8)
    usual = {"min_match": 2, "length": 7, "nodes": 7}
    for changed, told in (
        ({"min_match": 0}, "policy.min_match=0: allowed are 1 to 8"),
        ({"length": 0}, "policy.length=0: allowed are numbers >= 1"),
        ({"nodes": 0}, "policy.nodes=0: allowed are numbers >= 1"),
    ):
        with pytest.raises(UserError, match=told):
            CopyPolicy(**{**usual, **changed})


def test_a_pilot_is_fitted_and_scored_as_it_decides() -> None:
    shipped = OmegaConf.load(conf_dir() / "policy" / "pilot.yaml")
    assert (shipped.nodes, shipped.longest_copy) == (NODES, LONGEST_COPY)


def test_a_cycle_has_one_source() -> None:
    assert source_of(7, 8) == "draft"
    assert source_of(7, 1) == "draft", "a draft of which nothing is verified was paid for"
    assert source_of(0, 5) == "copy"
    assert source_of(0, 1) == "plain"
