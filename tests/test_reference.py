"""The slow reference's network against hand computations, transformers and its own laws.

Letters in shapes as in reference.py. Needs nothing of the package under test.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import reference as ref
import torch
from reference_kit import KINDS, MASK, SIZES, TRAINED, fill, tiny_target
from torch import Tensor
from transformers import Qwen3Config, Qwen3Model

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
