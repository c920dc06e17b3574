"""The native engine: the kernels give the model's own numbers, and the same bits at every width."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoding_kit import PROMPT, plain, sampler, tiny_target
from test_law import DRAFTERS, POLICIES, bound_methods

from blockpilot.decoding.loop import decode
from blockpilot.decoding.native import compiler
from blockpilot.decoding.native.target import NativeTarget

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler")

BUDGET = 12


@pytest.fixture(autouse=True)
def three_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_law.SIZES", (1, 2, 5))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.stem)
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda p: p.stem)
def test_same_tokens_as_plain_eager_decoding(drafter: Path, policy: Path) -> None:
    eager = tiny_target()
    wanted = {t: plain(eager, BUDGET, sampler(t)).tokens for t in (0.0, 1.0)}
    target = NativeTarget(eager)
    target.stop_ids = frozenset()
    for name, method in bound_methods(drafter, policy, target):
        for temperature, tokens in wanted.items():
            trace = decode(target, method, PROMPT, sampler(temperature), BUDGET)
            assert trace.tokens == tokens, (name, temperature)
