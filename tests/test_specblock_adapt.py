"""A SpecBlock drafter that learns from its stream: when, what, and that a sweep keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from decoding_kit import PROMPT, plain, sampler, tiny_target
from stages_kit import performed, sweep_arguments, write_prompts

from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method, decode
from blockpilot.drafters import specblock_learner
from blockpilot.drafters.specblock import SpecBlockDrafter
from blockpilot.drafters.specblock_learner import SpecBlockLearner
from blockpilot.drafters.update_bandit import WINDOW, UpdateBandit
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep.decoded import DecodedSweep

BUDGET = 12


def learning(adapt: int | None = 1000) -> tuple[SpecBlockDrafter, Method]:
    drafter = SpecBlockDrafter(
        checkpoint="random",
        ignore_keys=[],
        blocks=2,
        alternatives=[2, 4, 10, 0],
        adapt=adapt,
        block_size=8,
    )
    method = Method(drafter, FixedPolicy(block_size=None, block_mode="draft"))
    return drafter, method.bind(tiny_target())


def decoded(method: Method, n: int) -> list[int]:
    """The n-th prompt of a stream; its tokens, which are plain decoding's."""
    prompt = [*PROMPT, n % 60]
    tokens = decode(tiny_target(), method, prompt, sampler(0.0), BUDGET).tokens
    assert tokens == plain(tiny_target(), BUDGET, sampler(0.0), prompt).tokens
    return tokens


def weights(drafter: SpecBlockDrafter) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in drafter.network.named_parameters()}


def changed(before: dict[str, torch.Tensor], drafter: SpecBlockDrafter) -> set[str]:
    now = drafter.network.named_parameters()
    return {name for name, weight in now if not torch.equal(weight, before[name])}


class Scripted:
    """A clock on which a prompt takes as long as it is told, update and all."""

    def __init__(self) -> None:
        self.now_s, self.step_s = 0.0, 1.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def test_it_learns_after_the_stream_has_changed_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Scripted()
    monkeypatch.setattr(specblock_learner, "perf_counter", clock)
    drafter, method = learning()
    drafter.learn(None)
    first, n_quiet = weights(drafter), 3 * WINDOW
    for n in range(n_quiet):
        clock.step_s = 1.0 + 0.05 * (n % 3)
        decoded(method, n)
    assert drafter.updates == 0
    assert not changed(first, drafter)
    for n in range(2 * WINDOW):
        clock.step_s = 2.0
        decoded(method, n_quiet + n)
    assert drafter.updates
    assert changed(first, drafter)


def test_nothing_is_learnt_unless_a_stage_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a calibration or a cost curve decodes is no stream."""
    monkeypatch.setattr(UpdateBandit, "choose", lambda self: "all")
    drafter, method = learning()
    first = weights(drafter)
    for n in range(3):
        decoded(method, n)
    assert drafter.updates == 0
    assert not changed(first, drafter)
    never, method = learning(None)
    never.learn(None)
    for n in range(3):
        decoded(method, n)
    assert never.updates is None


@pytest.mark.parametrize("arm", specblock_learner.ARMS)
def test_an_arm_lowers_its_loss_and_moves_its_weights_alone(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specblock_learner, "has_16_bit_products", lambda device: False)
    drafter, method = learning()
    drafter.learn(None)
    for n in range(WINDOW + 1):
        decoded(method, n)
    learner = drafter._learner
    assert learner is not None

    def losses() -> float:
        draws = torch.Generator().manual_seed(9)
        with torch.no_grad():
            return sum(float(learner.loss(text, arm, draws)) for text in learner._texts)

    first, before = weights(drafter), losses()
    monkeypatch.setattr(specblock_learner, "_RATE", 1e-3)
    for _ in range(5):
        learner._update(arm)
    assert losses() < before
    heads = {"rank_head.inner.weight", "rank_head.outer.weight"}
    moved = changed(first, drafter)
    assert moved == heads if arm == "rank_head" else moved > heads
    text = learner._texts[-1]
    ids = torch.cat(text.ids).tolist()
    assert ids == [*PROMPT, WINDOW - 1, *decoded(method, WINDOW - 1)][: len(ids)]
    assert len(torch.cat(text.features)) == len(ids) - 1


def test_a_loss_that_is_not_finite_is_told_and_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(UpdateBandit, "choose", lambda self: "all" if self.newest else None)
    monkeypatch.setattr(SpecBlockLearner, "loss", lambda *given: torch.tensor(float("nan")))
    drafter, method = learning()
    drafter.learn(None)
    decoded(method, 0)
    first = weights(drafter)
    with pytest.raises(UserError, match=r"update 1 of the drafter: the loss is not finite"):
        decoded(method, 1)
    assert not changed(first, drafter)


def test_a_snapshot_is_all_that_was_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UpdateBandit, "choose", lambda self: "all" if self.newest else None)
    drafter, method = learning()
    drafter.learn(None)
    for n in range(3):
        decoded(method, n)
    saved = drafter.snapshot()
    other, again = learning()
    fresh = weights(other)
    other.learn(saved)
    assert other.updates == drafter.updates == 2
    assert not changed(weights(drafter), other)
    assert changed(fresh, other)
    decoded(again, 3)
    other.learn(None)
    assert other.updates == 0
    assert not changed(fresh, other), "anew"


@pytest.fixture
def from_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates before the third prompt and all after it."""

    def choose(bandit: UpdateBandit) -> str | None:
        later = len(bandit.newest) > 1 or bandit.costs["all"]
        return "all" if bandit.newest and later else None

    monkeypatch.setattr(UpdateBandit, "choose", choose)


def arguments(folder: Path, *more: str) -> list[str]:
    file = write_prompts(folder / "prompts.jsonl", [f"say {n}" for n in range(6)])
    own = ["drafter=specblock", "drafter.adapt=1000", "drafter.block_size=8", "radius=0"]
    return sweep_arguments(folder, file, *own, *more)


def updates_of(records: pd.DataFrame, method: str = "specblock8") -> list[int]:
    """In the order of the prompts."""
    rows = records[records["method"] == method].sort_values("prompt_id")
    return rows["drafter_update"].tolist()


@pytest.mark.usefixtures("from_the_third")
def test_an_interrupted_sweep_continues_from_what_was_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = performed(sweep.run, "sweep", *arguments(tmp_path / "whole"))
    assert updates_of(whole) == [0, 0, 1, 2, 3, 4]
    assert whole.loc[whole["method"] == "plain", "drafter_update"].isna().all()
    assert (whole.groupby("prompt_id")["output_sha256"].nunique() == 1).all()

    rows, made = DecodedSweep._rows, []

    def interrupted(self: DecodedSweep, prompt: object) -> Iterator[dict[str, object]]:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(prompt)
        return rows(self, prompt)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(DecodedSweep, "_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            performed(sweep.run, "sweep", *arguments(tmp_path / "parts"))
    kept = tmp_path / "parts/sweep/run/learnt/specblock8.safetensors"
    assert kept.exists()
    parts = performed(sweep.run, "sweep", *arguments(tmp_path / "parts"))
    # Weights are kept, not texts: there was none yet to learn from before the fifth prompt.
    assert updates_of(parts) == [0, 0, 1, 2, 2, 3]
    kept.write_bytes(b"x")
    with pytest.raises(UserError, match=r"specblock8.safetensors is broken"):
        performed(sweep.run, "sweep", *arguments(tmp_path / "parts"))


def test_what_would_mix_up_what_it_learns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = arguments(tmp_path, "sizes=[4]")
    with pytest.raises(UserError, match="specblock4 and specblock8 would teach the same drafter"):
        performed(sweep.run, "sweep", *shared)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="it learns in one process; this launch has 2"):
        performed(sweep.run, "sweep", *arguments(tmp_path))
