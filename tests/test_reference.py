"""The slow reference against hand computations, transformers and its own laws.

Letters in shapes as in reference.py. Needs nothing of the package under test.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import reference as ref
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

VOCAB = 61
MASK = 60
TRAINED = 5
KINDS = ("llama", "qwen3")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def fill(module: torch.nn.Module, seed: int, scale: float) -> None:
    """Random weights: matrices around 0, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise if p.dim() > 1 else 1 + noise)


def tiny_target(kind: str, seed: int = 0, tied: bool = False) -> Any:
    """A random causal LM of 4 layers, hidden 32, vocabulary 61, in float64."""
    sizes = SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": tied}
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if kind == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**sizes))
    )
    model = model.double().eval()
    fill(model, seed, 0.1)
    return model


def greedy(logits: Tensor, _position: int) -> int:
    """The likeliest token, whatever the position."""
    return ref.lowest_argmax(logits)


def keyed(logits: Tensor, position: int) -> int:
    """A sample whose noise depends on the position alone."""
    uniform = torch.rand(VOCAB, generator=torch.Generator().manual_seed(position)).double()
    return ref.lowest_argmax(logits - 0.5 * torch.log(-torch.log(uniform)))


# --- the network -------------------------------------------------------------------------------


def hand_rms(x: Sequence[float], weight: Sequence[float], eps: float) -> list[float]:
    root = math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [w * v / root for v, w in zip(x, weight, strict=True)]


def hand_turn(x: Sequence[float], angle: float) -> tuple[float, float]:
    c, s = math.cos(angle), math.sin(angle)
    return x[0] * c - x[1] * s, x[1] * c + x[0] * s


def test_one_layer_equals_scalars_written_out() -> None:
    """D = d = 2, two query heads on one key/value head, one context row, one slot, F = 1."""
    eps = 0.1
    state = {
        "fc.weight": [[1, 0, 0, 1], [0, 1, 0, 0]],
        "hidden_norm.weight": [2, 0.5],
        "norm.weight": [1, 3],
        "layers.0.input_layernorm.weight": [3, 1],
        "layers.0.post_attention_layernorm.weight": [0.5, 2],
        "layers.0.self_attn.q_proj.weight": [[1, 0], [0, 1], [0, 2], [1, 0]],
        "layers.0.self_attn.k_proj.weight": [[1, 1], [0, 1]],
        "layers.0.self_attn.v_proj.weight": [[1, 0], [0, -1]],
        "layers.0.self_attn.o_proj.weight": [[1, 0, 2, 0], [0, 1, 0, 1]],
        "layers.0.self_attn.q_norm.weight": [1, 0.5],
        "layers.0.self_attn.k_norm.weight": [2, 1],
        "layers.0.mlp.gate_proj.weight": [[1, -1]],
        "layers.0.mlp.up_proj.weight": [[2, 1]],
        "layers.0.mlp.down_proj.weight": [[1], [-2]],
    }
    config = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "rms_norm_eps": eps,
        "rope_theta": 100.0,
    }
    got = ref.reference_dflash(
        {k: torch.tensor(v, dtype=torch.float64) for k, v in state.items()},
        config,
        torch.tensor([[0.3, -0.2, 9.0, 0.5]], dtype=torch.float64),
        torch.tensor([[0.4, 1.1]], dtype=torch.float64),
        torch.tensor([7]),
        torch.tensor([5]),
    )

    context = hand_rms([0.3 + 0.5, -0.2], [2, 0.5], eps)  # fc, then hidden_norm
    x = [0.4, 1.1]
    b = hand_rms(x, [3, 1], eps)  # the block alone goes through input_layernorm
    k_context = hand_turn(hand_rms([context[0] + context[1], context[1]], [2, 1], eps), 5)
    k_block = hand_turn(hand_rms([b[0] + b[1], b[1]], [2, 1], eps), 7)
    v_context, v_block = [context[0], -context[1]], [b[0], -b[1]]
    out = []
    for query in ([b[0], b[1]], [2 * b[1], b[0]]):
        q = hand_turn(hand_rms(query, [1, 0.5], eps), 7)  # theta^0 = 1 turns by the position
        e_context = math.exp((q[0] * k_context[0] + q[1] * k_context[1]) / math.sqrt(2))
        e_block = math.exp((q[0] * k_block[0] + q[1] * k_block[1]) / math.sqrt(2))
        share = e_context / (e_context + e_block)
        out += [share * v_context[i] + (1 - share) * v_block[i] for i in range(2)]
    x = [x[0] + out[0] + 2 * out[2], x[1] + out[1] + out[3]]
    m = hand_rms(x, [0.5, 2], eps)
    gate, up = m[0] - m[1], 2 * m[0] + m[1]
    inner = gate / (1 + math.exp(-gate)) * up
    want = hand_rms([x[0] + inner, x[1] - 2 * inner], [1, 3], eps)

    assert got.shape == (1, 2)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got[0], torch.tensor(want, dtype=torch.float64))


def test_rope_turns_pairs_half_a_head_apart() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    got = ref.rope(x, torch.tensor([3]), 100.0)[0]  # angles 3 and 3 / sqrt(100)
    first, second = hand_turn([1, 3], 3), hand_turn([2, 4], 0.3)
    want = torch.tensor([first[0], second[0], first[1], second[1]], dtype=torch.float64)
    torch.testing.assert_close(got, want)


def test_rope_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)

    def score(m: int, n: int) -> Tensor:
        return (ref.rope(q, torch.tensor([m]), 1e4) * ref.rope(k, torch.tensor([n]), 1e4)).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert not torch.isclose(score(9, 4), score(9, 5))


def network(n_layers: int = 2) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """A random drafter and one draw of its inputs: 6 context rows, a block of 4."""
    config = tiny_target("llama").config
    state, drafter = ref.random_drafter(config, [0, 2], n_layers, TRAINED, MASK, seed=3)
    generator = torch.Generator().manual_seed(4)
    inputs = {
        "context_features": torch.randn(6, 64, generator=generator, dtype=torch.float64),
        "block_embeddings": torch.randn(4, 32, generator=generator, dtype=torch.float64),
        "block_positions": torch.arange(6, 10),
        "context_positions": torch.arange(6),
    }
    return state, drafter, inputs


def test_block_is_bidirectional_and_context_is_a_set() -> None:
    state, config, inputs = network()
    base = ref.reference_dflash(state, config, **inputs)
    assert base.shape == (4, 32)

    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = inputs | {
        "context_features": inputs["context_features"][order],
        "context_positions": order,
    }
    torch.testing.assert_close(ref.reference_dflash(state, config, **shuffled), base)

    later = inputs["block_embeddings"].clone()
    later[3] += torch.arange(32) / 32
    changed = ref.reference_dflash(state, config, **(inputs | {"block_embeddings": later}))
    assert (changed - base).abs().amax(dim=1).min() > 1e-4  # slot 0 sees slot 3


def test_network_sees_distances_not_positions() -> None:
    state, config, inputs = network()
    base = ref.reference_dflash(state, config, **inputs)
    both = inputs | {
        "block_positions": inputs["block_positions"] + 50,
        "context_positions": inputs["context_positions"] + 50,
    }
    torch.testing.assert_close(ref.reference_dflash(state, config, **both), base)
    one = inputs | {"block_positions": inputs["block_positions"] + 50}
    assert (ref.reference_dflash(state, config, **one) - base).abs().max() > 1e-4


def qwen3_without_causality(n_layers: int, seed: int) -> tuple[Any, dict[str, Tensor]]:
    model: Any = Qwen3Model(Qwen3Config(**SIZES, num_hidden_layers=n_layers))
    model = model.double().eval()
    fill(model, seed, 0.3)
    return model, {k: v for k, v in model.state_dict().items() if "embed" not in k}


def run_full_attention(model: Any, rows: Tensor) -> Tensor:
    mask = torch.ones(1, 1, len(rows), len(rows), dtype=torch.bool)
    with torch.no_grad():
        out = model(inputs_embeds=rows[None], attention_mask=mask, use_cache=False)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def test_without_context_it_is_qwen3_with_full_attention() -> None:
    model, state = qwen3_without_causality(n_layers=3, seed=5)
    _, config, inputs = network(n_layers=3)
    state |= {"fc.weight": torch.eye(32), "hidden_norm.weight": torch.ones(32)}
    block = inputs["block_embeddings"]
    got = ref.reference_dflash(
        state, config, torch.zeros(0, 32), block, torch.arange(4), torch.arange(0)
    )
    want = run_full_attention(model, block)  # its norms work in float32
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_one_layer_with_context_is_qwen3_over_both() -> None:
    """With a plain input norm, normed context rows pass a Qwen3 layer's own norm unchanged."""
    model, state = qwen3_without_causality(n_layers=1, seed=6)
    state["layers.0.input_layernorm.weight"].fill_(1.0)  # shares the model's memory
    _, config, inputs = network(n_layers=1)
    fc = torch.randn(32, 64, generator=torch.Generator().manual_seed(7)).double()
    state |= {"fc.weight": fc, "hidden_norm.weight": torch.ones(32, dtype=torch.float64)}
    got = ref.reference_dflash(state, config, **inputs)
    context = inputs["context_features"] @ fc.T
    context = context / context.pow(2).mean(dim=1, keepdim=True).sqrt()
    want = run_full_attention(model, torch.cat([context, inputs["block_embeddings"]]))[6:]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


# --- the target's features ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_unnormed_layer_outputs(kind: str) -> None:
    model = tiny_target(kind)
    ids = [5, 9, 2, 33, 7]
    got = ref.reference_features(model, ids, [0, 2, 3])
    assert got.shape == (5, 3 * 32)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        last = model.lm_head(model.model.norm(got[:, 64:]))
    torch.testing.assert_close(got[:, :32], out.hidden_states[1][0])
    torch.testing.assert_close(got[:, 32:64], out.hidden_states[3][0])
    torch.testing.assert_close(last, out.logits[0])
    assert not torch.allclose(got[:, 64:], out.hidden_states[4][0])


@pytest.mark.parametrize("layer", [-1, 4])
def test_layer_ids_out_of_range_are_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=str(layer)):
        ref.reference_features(tiny_target("llama"), [1, 2], [layer])


@pytest.mark.parametrize("kind", KINDS)
def test_draft_does_not_see_features_from_the_anchor_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage in the features of the anchor and later changes no draft; garbage before it does."""
    model = tiny_target(kind)
    state, config = ref.random_drafter(model.config, [1, 2], 2, TRAINED, MASK, seed=1)
    ids = [4, 8, 15, 16, 23]
    clean = ref.reference_draft(model, state, config, ids, TRAINED)
    features = ref.reference_features

    def spoil(start: int, stop: int) -> list[int]:
        def spoiled(*args: Any) -> Tensor:
            out = features(*args)
            out[start:stop] = -3 * out[start:stop].flip(1)
            return out

        monkeypatch.setattr(ref, "reference_features", spoiled)
        return ref.reference_draft(model, state, config, ids, TRAINED)

    assert spoil(4, 5) == clean
    assert spoil(0, 4) != clean


@pytest.mark.parametrize("kind", KINDS)
def test_draft_is_the_head_on_slots_one_and_on(kind: str) -> None:
    """Four ids: context 0, 1, 2 and the anchor at 3; slots at 3, 4, 5, the first drafts nothing."""
    model = tiny_target(kind)
    for seed in range(8):
        state, config = ref.random_drafter(model.config, [1, 2], 2, TRAINED, MASK, seed)
        ids = [seed, 8, 30, 16]
        table = model.model.embed_tokens.weight.detach()
        hidden = ref.reference_dflash(
            state,
            config,
            ref.reference_features(model, ids[:3], [1, 2]),
            torch.stack([table[16], table[MASK], table[MASK]]),
            torch.tensor([3, 4, 5]),
            torch.tensor([0, 1, 2]),
        )
        logits = hidden @ model.lm_head.weight.detach().T
        want = [int(logits[1].argmax()), int(logits[2].argmax())]
        assert ref.reference_draft(model, state, config, ids, 3) == want


# --- decoding ----------------------------------------------------------------------------------


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
