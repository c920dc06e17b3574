"""What a distillation owes its processes and its checkpoint: common measures, common ends."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stages_kit import distill_arguments, distill_prompts, performed

from blockpilot.base.errors import UserError
from blockpilot.distill import __main__ as distill
from blockpilot.distill import held_out
from blockpilot.distill.dflash import DFlashStudent
from blockpilot.distill.optimizer import DrafterOptimizer
from blockpilot.distill.responses import Request
from blockpilot.prompts.base import Prompt


@pytest.mark.parametrize("part", ["loss", "gradient", "weights"])
def test_a_value_that_is_not_finite_stops_the_training_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """At step 4 of 6, after the checkpoint of step 2; the fourth one's prompt is told."""
    given = distill_arguments(tmp_path, distill_prompts(tmp_path), "training.evaluate_every=2")
    loss, update = DFlashStudent.loss, DrafterOptimizer.step
    seen: list[str] = []

    def spoilt(student: DFlashStudent, *given: Any) -> Any:
        found = loss(student, *given)
        seen.append(student.network.norm.weight.sum().item())
        if len(seen) == 7 and part == "loss":
            return found * torch.inf
        if len(seen) == 7 and part == "gradient":
            found.register_hook(lambda gradient: gradient * torch.nan)
        return found

    def broken(optimizer: DrafterOptimizer) -> None:
        update(optimizer)
        if len(seen) == 8 and part == "weights":
            next(iter(optimizer._parts[0].param_groups[0]["params"])).data[0] = torch.inf

    monkeypatch.setattr(DFlashStudent, "loss", spoilt)
    monkeypatch.setattr(DrafterOptimizer, "step", broken)
    with pytest.raises(UserError, match=f"step 4: the {part}") as caught:
        performed(distill.run, "distill", *given)
    told = str(caught.value)
    assert "not finite" in told
    assert "\n" not in told
    assert told.count("local/p") == {"loss": 1, "gradient": 2, "weights": 0}[part]
    state = torch.load(tmp_path / "distill/run/checkpoint.pt", weights_only=True)
    assert state["step"] == 2
    assert all(weight.isfinite().all() for weight in state["network"].values())
    assert not (tmp_path / "distill/run/drafter").exists()


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_measure_together_what_one_process_measures(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Bit for bit: tenths added in another order give another mean."""
    requests = {
        name: [Request(Prompt(f"{name}{n}", name, (str(n),), "validation"), [n]) for n in range(n)]
        for name, n in (("many", 7), ("one", 1), ("none", 0))
    }
    bound: list[Any] = []
    method: Any = SimpleNamespace(bind=bound.append)
    target: Any = "target"

    def decoded(target: Any, method: Any, ids: list[int], *rest: Any) -> SimpleNamespace:
        return SimpleNamespace(committed=[] if ids == [3] else [1] * 10 + [ids[0]])

    def measured() -> dict[str, float]:
        return held_out.held_out_taus(
            target, method, requests, temperature=1.0, seed=0, max_new_tokens=12
        )

    monkeypatch.setattr(held_out, "decode", decoded)
    monkeypatch.setattr(held_out, "round", lambda value, digits: value, raising=False)
    whole = measured()
    assert whole == {"many": sum((10 + n) / 11 for n in (0, 1, 2, 4, 5, 6)) / 6, "one": 10 / 11}
    shares: list[list[Any]] = []

    def gathered(mine: list[Any]) -> list[Any]:
        shares.append(mine)
        return [each for share in reversed(shares) for each in share]

    monkeypatch.setattr(held_out, "gather_object", gathered)
    for rank in range(ranks):
        place = SimpleNamespace(process_index=rank, num_processes=ranks)
        monkeypatch.setattr(held_out, "PartialState", lambda place=place: place)
        last = measured()
    assert last == whole
    assert max(map(len, shares)) < len(requests["many"])
    assert bound == ["target"] * (1 + ranks)


def test_processes_wait_for_each_other_without_torchs_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*, cpu: bool, timeout: timedelta) -> None:
        raise UserError(f"waits {timeout.days} days")

    monkeypatch.setattr(distill, "PartialState", begun)
    with pytest.raises(UserError, match="waits 30 days"):
        performed(distill.run, "distill", *distill_arguments(tmp_path, distill_prompts(tmp_path)))
