"""The slow reference's decoding against plain decoding and counts made by hand.

Needs nothing of the package under test.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import reference as ref
import torch
from reference_kit import KINDS, MASK, TRAINED, greedy, keyed, tiny_target
from torch import Tensor


def test_decode_equals_plain_for_every_size_and_mode() -> None:
    cycles: list[int] = []
    differ = 0
    for kind in KINDS:
        for seed in range(2):
            model = tiny_target(kind, seed, tied=bool(seed))
            state, config = ref.random_drafter(model.config, [1, 3], 2, TRAINED, MASK, seed)
            for choose in (greedy, keyed):
                plain = ref.reference_plain(model, [1, 2, 3], 14, (), choose)
                for size in range(1, TRAINED + 1):
                    outs = {
                        mode: ref.reference_dflash_decode(
                            model, state, config, [1, 2, 3], 14, (), choose, size, mode
                        )
                        for mode in ref.BLOCK_MODES
                    }
                    for tokens, committed in outs.values():
                        assert tokens == plain
                        assert sum(committed) + 1 == len(tokens) == 14
                        assert 1 <= min(committed) <= max(committed) <= size
                        cycles += committed
                    differ += outs["draft"][1] != outs["verify"][1]
    assert sum(c > 1 for c in cycles) > 5  # some drafts are accepted
    assert differ > 0  # the two modes draft differently


def test_block_of_one_is_plain_and_calls_no_drafter() -> None:
    model = tiny_target("llama")
    plain = ref.reference_plain(model, [1, 2], 6, (), keyed)
    for mode in ref.BLOCK_MODES:
        got = ref.reference_dflash_decode(
            model, {}, {"block_size": TRAINED}, [1, 2], 6, (), keyed, 1, mode
        )
        assert got == (plain, [1] * 5)


GOLD = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def scripted(
    monkeypatch: pytest.MonkeyPatch,
    wrong: set[int],
    budget: int,
    stops: Sequence[int],
    size: int,
    mode: str = "draft",
) -> tuple[list[int], list[int]]:
    """Decode GOLD after two prompt tokens, drafts right except at the GOLD indices in wrong."""

    def choose(_logits: Tensor, position: int) -> int:
        return GOLD[position - 2] if position - 2 < len(GOLD) else 1

    def draft(_model: Any, _state: Any, _config: Any, ids: Sequence[int], n: int) -> list[int]:
        rows = range(len(ids) - 2, len(ids) - 2 + n - 1)
        return [MASK if i in wrong else (GOLD + [1] * TRAINED)[i] for i in rows]

    monkeypatch.setattr(ref, "reference_draft", draft)
    model = tiny_target("llama")
    config = {"block_size": TRAINED}
    return ref.reference_dflash_decode(model, {}, config, [1, 2], budget, stops, choose, size, mode)


@pytest.mark.parametrize("mode", ref.BLOCK_MODES)
@pytest.mark.parametrize(
    ("wrong", "budget", "stops", "size", "committed"),
    [
        (set(), 9, (), 4, [4, 4]),
        (set(), 8, (), 4, [4, 3]),  # the last block is whole, its commit is cut
        (set(), 3, (), 5, [2]),
        ({1}, 10, (), 4, [1, 4, 4]),  # bonus token only, then full blocks
        ({3}, 10, (), 4, [3, 4, 2]),
        ({1, 2, 3, 4, 5, 6, 7, 8, 9}, 5, (), 4, [1, 1, 1, 1]),
        (set(), 10, (12,), 4, [2]),  # the stop token is an accepted draft
        (set(), 10, (14,), 4, [4]),  # ... the bonus token of a full block
        ({3}, 10, (13,), 4, [3]),  # ... the bonus token after a wrong draft
        (set(), 10, (15,), 4, [4, 1]),
        (set(), 10, (17, 12), 5, [2]),  # the first of two
        (set(), 10, (10,), 4, []),
        (set(), 1, (), 4, []),
        (set(), 2, (), 4, [1]),
    ],
)
def test_committed_counts_by_hand(
    monkeypatch: pytest.MonkeyPatch,
    wrong: set[int],
    budget: int,
    stops: tuple[int, ...],
    size: int,
    committed: list[int],
    mode: str,
) -> None:
    tokens, got = scripted(monkeypatch, wrong, budget, stops, size, mode)
    assert got == committed
    assert tokens == GOLD[: 1 + sum(committed)]


def test_no_budget_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scripted(monkeypatch, set(), 0, (), 4) == ([], [])
    assert ref.reference_plain(tiny_target("llama"), [1, 2], 0, (), greedy) == []


def test_plain_stops_at_the_stop_token() -> None:
    model = tiny_target("qwen3")
    plain = ref.reference_plain(model, [1, 2], 12, (), keyed)
    assert len(plain) == 12
    stop = plain[5]
    assert ref.reference_plain(model, [1, 2], 12, {stop}, keyed) == plain[: plain.index(stop) + 1]


@pytest.mark.parametrize(
    ("size", "mode", "message"),
    [(0, "draft", "under 1"), (TRAINED + 1, "verify", "trained"), (2, "both", "block_mode")],
)
def test_settings_without_meaning_are_refused(size: int, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ref.reference_dflash_decode(
            None, {}, {"block_size": TRAINED}, [1], 3, (), greedy, size, mode
        )


def test_random_drafter_has_the_published_form() -> None:
    config = tiny_target("qwen3").config
    state, drafter = ref.random_drafter(config, [0, 2], 2, TRAINED, MASK, seed=0)
    again, _ = ref.random_drafter(config, [0, 2], 2, TRAINED, MASK, seed=0)
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert len(state) == 3 + 2 * 11
    assert state["fc.weight"].shape == (32, 64)
    assert state["layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert state["layers.1.self_attn.k_norm.weight"].shape == (8,)
    assert {tensor.dtype for tensor in state.values()} == {torch.float64}
    assert drafter["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
    assert (drafter["num_target_layers"], drafter["block_size"]) == (4, TRAINED)
