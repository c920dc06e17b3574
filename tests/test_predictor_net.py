"""The net of the predictor and what it reads, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blockpilot.predictor.net import (
    BlockSizeNet,
    PredictorConfig,
    features_of,
    parameters_of,
)


def test_features_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    hidden, length = torch.tensor([[5.0, 6.0]]), torch.tensor([7])

    def read(kind: str) -> torch.Tensor:
        return features_of(kind, logits, hidden, length)

    p = logits.softmax(-1)[0]
    assert torch.equal(read("logits"), logits)
    torch.testing.assert_close(read("softmax")[0], p)
    torch.testing.assert_close(read("top_k")[0], p.log().sort(descending=True).values)
    assert torch.equal(read("hidden"), hidden)
    assert float(read("normalized").mean()) == pytest.approx(0, abs=1e-6)
    wanted = [-(p * p.log()).sum(), p.max(), 1.0, 1.0, np.log(7)]
    torch.testing.assert_close(
        read("summary")[0], torch.tensor(wanted).float(), atol=1e-5, rtol=1e-5
    )


def test_the_papers_net_has_the_papers_size() -> None:
    """V = 151,936, width 2048, five sizes: 315,373,573 parameters."""
    config = PredictorConfig(
        sizes=(14, 15, 16, 17, 18),
        block_mode="draft",
        features="logits",
        hidden=2048,
        depth=2,
        dropout=0.2,
        target="qwen3-4b",
        target_fingerprint="",
        dtype="bfloat16",
        drafter=None,
        vocab_size=151_936,
        hidden_size=2560,
    )
    with torch.device("meta"):
        assert parameters_of(BlockSizeNet(config)) == 315_373_573
