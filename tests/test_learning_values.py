"""A predictor's training that meets values which are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stages_kit import composed
from test_learning import SMALL, outputs, separable

from blockpilot import train
from blockpilot.base.errors import UserError
from blockpilot.predictor.net import BlockSizeNet
from blockpilot.predictor.trainer import Data, PredictorTrainer, data_of

CPU = torch.device("cpu")


def trainer_of(folder: Path) -> tuple[PredictorTrainer, Data, Data]:
    cfg = composed("train", "dataset=x", *SMALL, "epochs=10", "batch_size=4", *outputs(folder))
    examples = separable(12, 0)
    data = data_of(examples, "logits", 0.1, CPU)
    trainer = PredictorTrainer(train.untrained(cfg, examples), train.optimisation(cfg), folder, CPU)
    return trainer, data, data_of(separable(12, 1), "logits", 0.1, CPU)


@pytest.mark.parametrize("part", ["loss", "gradient"])
def test_training_stops_before_the_weights_change_and_names_the_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """At step 2 of epoch 4; a checkpoint of every epoch stands."""
    trainer, data, validation = trainer_of(tmp_path)
    forward, calls = BlockSizeNet.forward, []
    before: dict[str, torch.Tensor] = {}

    def spoilt(net: BlockSizeNet, x: torch.Tensor) -> Any:
        scores = forward(net, x)
        if not net.training:
            return scores
        calls.append(x)
        if len(calls) == 3 * 3 + 2:
            before.update({k: v.clone() for k, v in net.state_dict().items()})
            if part == "loss":
                return scores * torch.tensor([1.0, 1.0, torch.nan, 1.0])[:, None]
            scores.register_hook(lambda gradient: gradient * torch.inf)
        return scores

    monkeypatch.setattr(BlockSizeNet, "forward", spoilt)
    with pytest.raises(UserError, match="epoch 4, step 2: loss or gradient is not") as caught:
        trainer.run(data, validation, lambda curves, epoch: None)
    rows = [int((data.features == row).all(dim=1).nonzero()) for row in calls[-1]]
    blamed = rows[2:3] if part == "loss" else sorted(rows)
    assert f"examples {', '.join(map(str, blamed))};" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in trainer.net.state_dict().items())
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 3


@pytest.mark.parametrize(("value", "named"), [("logits", "features=logits"), ("gains", "gains")])
def test_examples_that_are_not_finite_are_refused_by_name(value: str, named: str) -> None:
    examples = separable(12, 0)
    getattr(examples, value)[[2, 5], 1] = torch.nan
    with pytest.raises(UserError, match=rf"{named} of 2, 5 are not finite"):
        data_of(examples, "logits", 0.1, CPU)
