"""Curves: what they may hold, rooflines of large targets, and following the cycles of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding_kit import PROMPT, plain, sampler, tiny_target
from omegaconf import OmegaConf
from test_replay_trees import Unsure
from transformers import AutoConfig, AutoModelForCausalLM

from blockpilot.base.errors import UserError
from blockpilot.base.paths import conf_dir
from blockpilot.costs.curve import CostCurve, CostPoint, cost_settings, load_cost
from blockpilot.costs.fits import OnlineCost, Roofline, Shapes, most_per_second
from blockpilot.decoding import loop
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.timing import Clock
from blockpilot.decoding.types import Trace
from blockpilot.decoding.verify import verify
from blockpilot.policies.tree import TreePolicy

CONTEXTS = (64, 256, 1024, 2048)
SMALL, LARGE = (2, 4, 8, 16, 32, 64), (16, 32, 64, 128, 256, 512)


def config_of(model: str) -> Any:
    architecture: Any = OmegaConf.load(conf_dir() / "model" / f"{model}.yaml").architecture
    values: Any = OmegaConf.to_container(architecture)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def tree_points(cells: list[tuple[int, int]], seconds: list[float]) -> list[CostPoint]:
    return [
        CostPoint(*cell, 1, s, *[0.0] * 6, kind="tree")
        for cell, s in zip(cells, seconds, strict=True)
    ]


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["to-64", "to-512"])
@pytest.mark.parametrize("model", ["qwen3-4b", "qwen3-8b", "qwen3-coder-30b"])
def test_a_roofline_finds_the_bounds_of_a_large_target(
    model: str, sizes: tuple[int, ...], noise: float
) -> None:
    shapes = Shapes.of(config_of(model))
    cells = list(itertools.product(sizes, CONTEXTS))
    draw = np.random.default_rng(0)
    for knee in (1.2 * size for size in sizes[1:4]):  # positions at which the bound changes
        memory = 1e-12, 5e-3
        peak = shapes.flops(knee, 256) / (memory[0] * shapes.numbers(knee, 256) + 3e-3)
        true = Roofline(shapes, (1 / peak, 2e-3), memory)
        exact = [true.seconds(*cell) for cell in cells]
        seen = [s * float(np.exp(noise * draw.normal())) for s in exact]
        fitted = Roofline.fit(shapes, tree_points(cells, seen))
        for cell, seconds in zip(cells, exact, strict=True):
            assert fitted.seconds(*cell) == pytest.approx(seconds, rel=0.05 if noise else 1e-3)


def test_shapes_count_the_weights_of_a_model() -> None:
    target = tiny_target()
    matrices = [w for n, w in target.model.named_parameters() if w.ndim == 2 and "embed" not in n]
    assert Shapes.of(target.config).weights == sum(w.numel() for w in matrices)
    assert Shapes.of(target.config).keys_values == 2 * 4 * 2 * 8


def test_a_mixture_computes_with_its_active_experts_and_reads_those_that_positions_want() -> None:
    config = config_of("qwen3-coder-30b")
    shapes = Shapes.of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    named = [(n, w) for n, w in model.named_parameters() if w.ndim > 1 and "embed" not in n]
    experts = sum(w.numel() for n, w in named if ".experts." in n)
    others = sum(w.numel() for n, w in named if ".experts." not in n)
    assert shapes.flops(1, -0.5) == 2 * (others + experts * 8 / 128), "without attention"
    read = [shapes.numbers(s, 0) - shapes.keys_values * s for s in (1, 2, 10_000)]
    assert read[0] == pytest.approx(others + experts * 8 / 128)
    assert read[1] == pytest.approx(others + experts * (1 - (120 / 128) ** 2))
    assert read[2] == pytest.approx(others + experts)
    dense = replace(shapes, expert=0.0, n_experts=0, n_active=0)
    assert dense.flops(7, 3) < shapes.flops(7, 3)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("cycle_s", -1.0, "seconds > 0"),
        ("cycle_s", 0.0, "seconds > 0"),
        ("draft_s", -1e-3, "seconds >= 0"),
        ("block_size", 0, "an integer >= 1"),
    ],
)
def test_a_point_that_cannot_be_is_refused_with_its_file(
    tmp_path: Path, key: str, value: object, allowed: str
) -> None:
    good, bad = tree_points([(2, 4), (8, 4)], [1.0, 2.0])
    curve = CostCurve({}, {}, [good, replace(bad, **{key: value})])  # type: ignore[arg-type]
    file = tmp_path / "cost.json"
    file.write_text(curve.to_json())
    problem = rf"cost\.json: point 1 has {key}={value}: allowed is {allowed}"
    with pytest.raises(UserError, match=problem):
        load_cost(file, {})


# --- a curve read between its points -------------------------------------------------------------


def points() -> list[CostPoint]:
    costs = {(1, 100): 2.0, (1, 200): 4.0, (9, 100): 10.0, (9, 200): 12.0}
    rest = (0.0,) * 6  # quartiles and parts
    return [CostPoint(*cell, 3, seconds, *rest) for cell, seconds in costs.items()]


def test_the_least_certain_median_says_what_a_curve_can_tell_apart() -> None:
    rest = (0.0, 0.0, 0.0, 0.0)
    sure = CostPoint(1, 100, 25, 2.0, 2.0, 2.0, *rest)
    # Quartiles of a normal distribution with sigma 0.2 about 2: 0.2 / 5 times 1.2533, over 2.
    unsure = CostPoint(8, 100, 1001, 2.0, 1.8651, 2.1349, *rest)
    wanted = 0.2 / math.sqrt(1001) * math.sqrt(math.pi / 2) / 2
    assert CostCurve({}, {}, [sure]).uncertainty() == 0
    assert CostCurve({}, {}, [sure, unsure]).uncertainty() == pytest.approx(wanted, rel=0.02)
    # Of three numbers the quartiles lie closer: 0.846 sigma apart, and their median errs by 0.67.
    three = CostPoint(8, 100, 3, 1.0, 1.0, 1.0846, *rest)
    assert CostCurve({}, {}, [three]).uncertainty() == pytest.approx(0.067, rel=0.02)
    once = CostPoint(8, 100, 1, 1.0, 1.0, 1.0, *rest)
    assert math.isnan(CostCurve({}, {}, [once]).uncertainty()), "nothing is known of its spread"


def test_a_prediction_counts_the_reading_of_the_prompt_once() -> None:
    rest = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    points = [
        CostPoint(size, context, 3, 1.0, *rest, start_s=0.0 if size == 1 else context / 100)
        for size in (1, 8)
        for context in (100, 200)
    ]
    curve = CostCurve({}, {}, points)
    plain = Trace(committed=[1, 1], verified=[1, 1], drafted=[0, 0])
    assert curve.predicted(plain, 150, trees=False) == {"predicted_decode_s": 2}
    drafted = Trace(committed=[3, 1, 2], verified=[8, 1, 8], drafted=[7, 0, 7])
    assert curve.predicted(drafted, 150, trees=False) == {"predicted_decode_s": 3 + 1.5}


def test_costs_are_linear_between_what_was_measured() -> None:
    curve = CostCurve({}, {}, points())
    assert curve.seconds(1, 100) == 2
    assert curve.seconds(1, 150) == 3
    assert curve.seconds(5, 100) == 6
    assert curve.seconds(5, 150) == 7
    assert curve.seconds(9, 5) == 10, "the nearest context"
    trace = Trace(committed=[50, 50, 1], verified=[1, 9, 9], drafted=[0, 8, 8])
    assert curve.predicted(trace, 100, trees=False) == {"predicted_decode_s": 2 + 11 + 12}
    with pytest.raises(UserError, match=r"no cost for block size 10: the curve holds 1\.\.9"):
        curve.seconds(10, 100)


# --- curves that follow the run -------------------------------------------------------------------

NODES = 63
POSITIONS = range(2, NODES + 2)
TOKENS = (1 + 3 * (1 - np.exp(-np.arange(1, NODES + 1) / 12))).tolist()  # expected, per nodes


def claimed(positions: int) -> float:
    """The seconds of the curve that is given."""
    return 0.02 + 0.0001 * positions


TRUTHS: dict[str, Callable[[int], float]] = {
    "all sizes": lambda s: 3 * claimed(s),
    "large trees dearer": lambda s: claimed(s) * (3 if s > 16 else 1),
    "large trees cheaper": lambda s: claimed(s) if s > 16 else 3 * claimed(s),
}


def cycles(online: OnlineCost, true: Callable[[int], float]) -> Iterator[int]:
    """Nodes of one cycle after the other, each learnt from; times scatter by 5%."""
    predicted = [claimed(s) for s in POSITIONS]
    draw = np.random.default_rng(1)
    while True:
        nodes = most_per_second(TOKENS, online.seconds(predicted))
        took = true(nodes + 1) * float(np.exp(0.05 * draw.normal()))
        online.learn(nodes + 1, took, predicted[nodes - 1])
        yield nodes


def rate(nodes: int, true: Callable[[int], float]) -> float:
    return TOKENS[nodes - 1] / true(nodes + 1)


@pytest.mark.parametrize("wrong", TRUTHS)
def test_a_curve_that_is_wrong_by_three_is_mended_within_50_cycles(wrong: str) -> None:
    true = TRUTHS[wrong]
    online = OnlineCost()
    chosen = list(itertools.islice(cycles(online, true), 50))
    best = max(rate(nodes, true) for nodes in range(1, NODES + 1))
    for nodes in chosen[-20:]:
        assert rate(nodes, true) > 0.98 * best
    for seconds, positions in zip(
        online.seconds([claimed(s) for s in POSITIONS]), POSITIONS, strict=True
    ):
        assert seconds == pytest.approx(true(positions), rel=0.2)


@pytest.mark.parametrize("at", [0, 1, 10, 30])
def test_a_lone_outlier_costs_a_few_cycles_at_most(at: int) -> None:
    calls, steady = itertools.count(), TRUTHS["large trees dearer"]
    best = max(rate(nodes, steady) for nodes in range(1, NODES + 1))

    def disturbed(positions: int) -> float:
        return steady(positions) * (50 if next(calls) == at else 1)

    poor = [
        [rate(nodes, steady) < 0.98 * best for nodes in itertools.islice(run, 60)]
        for run in (cycles(OnlineCost(), steady), cycles(OnlineCost(), disturbed))
    ]
    assert sum(poor[1]) <= sum(poor[0]) + 3
    assert not any(poor[1][40:])


def test_a_machine_that_changes_is_followed() -> None:
    calls = itertools.count()

    def true(positions: int) -> float:
        return claimed(positions) * (3 if positions > 16 and next(calls) > 100 else 1)

    chosen = list(itertools.islice(cycles(OnlineCost(), true), 250))
    assert chosen[60] > 16 > chosen[-1]


@pytest.fixture
def curve(tmp_path: Path) -> str:
    """What is claimed of trees, for the tiny target and a scripted drafter."""
    drafter: Any = Unsure()
    cells = [(s, 4) for s in (2, 4, 8, 16, 32, 64)]
    points = tree_points(cells, [claimed(s) for s, _ in cells])
    file = tmp_path / "cost.json"
    file.write_text(CostCurve(cost_settings(tiny_target(), drafter), {}, points).to_json())
    return str(file)


@pytest.fixture
def scripted_time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that every clock of a decode reads."""
    now = [0.0]
    monkeypatch.setattr(loop, "Clock", lambda device: Clock(device, lambda: now[0]))
    return now


def decoded(curve: str, now: list[float], *, online: bool, n: int) -> list[Trace]:
    """Traces of one policy over several decodes; a large tree takes three times what is claimed."""
    target, drafter = tiny_target(), Unsure()
    drafter.gold = plain(target, 60, sampler(1.0)).tokens
    part: Any = drafter

    def slow(*given: Any) -> Any:
        now[0] += TRUTHS["large trees dearer"](given[3].tokens.shape[0] + 1)
        return verify(*given)

    policy = TreePolicy(nodes=NODES, cost=curve, fit="measured", online=online)
    method = Method(part, policy).bind(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockpilot.decoding.loop.verify", slow)
        traces = [decode(target, method, PROMPT, sampler(1.0), 60) for _ in range(n)]
    assert all(trace.tokens == drafter.gold for trace in traces), "the text is plain decoding's"
    return traces


def test_decoding_follows_its_own_cycles_and_keeps_their_seconds(
    curve: str, scripted_time: list[float]
) -> None:
    still = decoded(curve, scripted_time, online=False, n=1)
    following = decoded(curve, scripted_time, online=True, n=2)
    assert all(trace.cycle_s is None for trace in still)
    for trace in following:
        assert trace.cycle_s == pytest.approx(
            [TRUTHS["large trees dearer"](positions) for positions in trace.verified]
        )
        assert sum(trace.cycle_s or []) == pytest.approx(trace.decode_s)
    assert set(still[-1].verified) - set(range(18)), "the curve asks for large trees"
    assert set(following[-1].verified) <= set(range(17))
    assert following[-1].decode_s < still[-1].decode_s


def test_a_cycle_is_learnt_with_its_own_size(curve: str, scripted_time: list[float]) -> None:
    """Each cycle's seconds come one cycle late, beside the size of the cycle that took them."""
    learnt: list[tuple[int, float]] = []

    class Spy(OnlineCost):
        def learn(self, positions: int, seconds: float, predicted: float) -> None:
            learnt.append((positions, seconds))
            super().learn(positions, seconds, predicted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockpilot.policies.tree.OnlineCost", Spy)
        trace = decoded(curve, scripted_time, online=True, n=1)[0]
    assert trace.cycle_s is not None
    wanted = list(zip(trace.verified, trace.cycle_s, strict=True))[: len(learnt)]
    assert len(learnt) == len(trace.verified) - 2
    assert len({positions for positions, _ in learnt}) > 3
    for (positions, seconds), (verified, took) in zip(learnt, wanted, strict=True):
        assert positions == verified
        assert seconds == pytest.approx(took)


def test_what_follows_a_clock_says_so(curve: str) -> None:
    drafter: Any = Unsure()
    names = []
    for online in (False, True):
        policy = TreePolicy(nodes=7, cost=curve, fit="roofline", online=online)
        policy.bind(tiny_target(), drafter)
        names.append(policy.fingerprint)
    assert names[1] == f"{names[0]}-online"
    with pytest.raises(UserError, match=r"policy\.online=true: .* give policy\.cost"):
        TreePolicy(nodes=7, cost=None, fit=None, online=True)
