"""Which device and dtype a run computes on and in."""

from __future__ import annotations

import pytest
import torch
from decoding_kit import tiny_target

from blockpilot.base import devices
from blockpilot.base.devices import pick_device, pick_dtype
from blockpilot.base.errors import UserError

CPU = torch.device("cpu")


def test_a_device_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"device=cuda .*there are auto, cpu$"):
        pick_device("cuda")
    with pytest.raises(UserError, match="device=tpu"):
        pick_device("tpu")


def test_each_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:1")
    assert pick_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(UserError, match=r"device=cuda:2: .*there are auto, cpu, cuda:0, cuda:1$"):
        pick_device("cuda:2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"device=auto \(GPU 2\)"):
        pick_device("auto")


@pytest.mark.parametrize("fast", [True, False])
def test_auto_dtype_is_the_models_own_where_it_is_computed(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(devices, "has_16_bit_products", lambda device: fast)
    wanted = torch.bfloat16 if fast else torch.float32
    assert pick_dtype("auto", "bfloat16", CPU) is wanted
    assert pick_dtype("auto", "float64", CPU) is torch.float64
    assert pick_dtype("bfloat16", "float32", CPU) is torch.bfloat16


def test_a_dtype_is_taken_as_asked_or_refused() -> None:
    assert pick_dtype("float64", "bfloat16", CPU) is torch.float64
    with pytest.raises(UserError, match="dtype=int8: must be auto, float32"):
        pick_dtype("int8", "bfloat16", CPU)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65])
def test_the_heads_way_round_does_not_show_in_the_logits(rows: int) -> None:
    target = tiny_target(dtype=torch.float32)
    hidden = torch.randn(rows, 32)
    want = hidden.double() @ target.model.get_output_embeddings().weight.double().T
    torch.testing.assert_close(target.logits(hidden).double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(target.logits(hidden[None])[0], target.logits(hidden))
