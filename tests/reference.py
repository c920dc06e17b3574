"""Slow reference of DFlash drafting and of lossless speculative decoding, for tests only.

Written from the facts (DFlash: arXiv 2602.06036, summed up in the project's notes on the methods)
and from nothing of this package: float64, plain loops, no caches, one sequence at a time. What it
computes is meant to be read, not to be fast.

Letters in shapes
    T  tokens of a sequence             C  context positions (all strictly before the anchor)
    B  slots of a block, anchor first   D  hidden size of target and drafter
    V  vocabulary (embedding rows)      n  target layers whose outputs are features
    H  query heads                      G  key/value heads (H is a multiple of G)
    d  head dim                         F  width of the MLP
    N  any number of rows
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Choose = Callable[[Tensor, int], int]
"""(logits [V], position) -> the token at that absolute position; the logits stand one before."""

BLOCK_MODES = ("draft", "verify")


# --- the drafter's network ---------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row of x [..., N] by its root mean square, then scale by weight [N]."""
    return weight * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps))


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [N, d] at positions [N], in the half-split form of Llama and Qwen3.

    The pair (x_i, x_{i + d/2}) turns by the angle position * theta^(-2i/d), i = 0..d/2 - 1.
    """
    d = x.shape[-1]
    half = d // 2
    speed = torch.tensor([theta ** (-2 * i / d) for i in range(half)], dtype=torch.float64)
    angle = positions.to(torch.float64)[:, None] * speed[None, :]  # [N, d/2]
    first, second = x[:, :half], x[:, half:]
    return torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ],
        dim=1,
    )


def _attention(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    block: Tensor,  # [B, D], after the layer's input norm
    context: Tensor,  # [C, D], H_context, not passed through the layer's input norm
    block_positions: Tensor,  # [B]
    context_positions: Tensor,  # [C]
) -> Tensor:  # [B, D]
    """Attention with KV injection: queries of the block, keys and values of [context ; block]."""
    n_heads, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    d, eps, theta = config["head_dim"], config["rms_norm_eps"], config["rope_theta"]
    rows = torch.cat([context, block], dim=0)  # [C + B, D]
    positions = torch.cat([context_positions, block_positions])  # [C + B]
    q_all = block @ weights["self_attn.q_proj.weight"].T  # [B, H * d]
    k_all = rows @ weights["self_attn.k_proj.weight"].T  # [C + B, G * d]
    v_all = rows @ weights["self_attn.v_proj.weight"].T  # [C + B, G * d]
    heads = []
    for h in range(n_heads):
        g = h // (n_heads // n_kv)  # consecutive query heads share one key/value head
        q = rms_norm(q_all[:, h * d : (h + 1) * d], weights["self_attn.q_norm.weight"], eps)
        k = rms_norm(k_all[:, g * d : (g + 1) * d], weights["self_attn.k_norm.weight"], eps)
        v = v_all[:, g * d : (g + 1) * d]  # [C + B, d]
        q = rope(q, block_positions, theta)
        k = rope(k, positions, theta)
        slots = []
        for j in range(block.shape[0]):
            score = (k @ q[j]) / math.sqrt(d)  # [C + B], nothing masked
            share = torch.exp(score - score.max())
            slots.append((share / share.sum()) @ v)
        heads.append(torch.stack(slots))  # [B, d]
    return torch.cat(heads, dim=1) @ weights["self_attn.o_proj.weight"].T


def _mlp(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """SwiGLU of x [N, D] -> [N, D]: down(silu(gate x) * up x)."""
    gate = x @ weights["mlp.gate_proj.weight"].T  # [N, F]
    up = x @ weights["mlp.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ weights["mlp.down_proj.weight"].T


def reference_dflash(
    state_dict: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context_features: Tensor,  # [C, n * D]
    block_embeddings: Tensor,  # [B, D]
    block_positions: Tensor,  # [B]
    context_positions: Tensor,  # [C]
) -> Tensor:  # [B, D]
    """Hidden states of one block after the drafter's final norm (arXiv 2602.06036).

    H_context = RMSNorm(fc(features)), made once and read by every layer. Each layer is a pre-norm
    Qwen3 layer on the block alone, whose keys and values also come from H_context. The target's LM
    head on row j gives the logits of the token at block_positions[j], j >= 1.

    Args:
        state_dict: tensors under the published names (`layers.0.self_attn.q_proj.weight`, ...).
        config: the published form, flat (`num_hidden_layers`, `head_dim`, `rope_theta`, ...).
        context_features: outputs of the target's layers `target_layer_ids`, concatenated in the
            order of the ids, for positions strictly before the anchor.
        block_embeddings: target embeddings of [anchor, MASK, MASK, ...].
        block_positions: absolute positions of the slots, anchor first.
        context_positions: absolute positions of the context.
    """
    eps = config["rms_norm_eps"]
    tensors = {name: tensor.to(torch.float64) for name, tensor in state_dict.items()}
    context = context_features.to(torch.float64) @ tensors["fc.weight"].T
    context = rms_norm(context, tensors["hidden_norm.weight"], eps)  # [C, D]
    hidden = block_embeddings.to(torch.float64)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        normed = rms_norm(hidden, weights["input_layernorm.weight"], eps)
        hidden = hidden + _attention(
            weights, config, normed, context, block_positions, context_positions
        )
        normed = rms_norm(hidden, weights["post_attention_layernorm.weight"], eps)
        hidden = hidden + _mlp(weights, normed)
    return rms_norm(hidden, tensors["norm.weight"], eps)


# --- the target --------------------------------------------------------------------------------


def reference_logits(target_model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] of one forward over the whole sequence, float64."""
    with torch.no_grad():
        out = target_model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    logits: Tensor = out.logits[0].to(torch.float64)
    return logits


def reference_features(target_model: Any, ids: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
    """Concatenated outputs of decoder layers `layer_ids` for every position: [T, n * D].

    Entry i + 1 of the hidden-state tuple is the output of layer i, except that transformers
    replaces the last entry by the one after the final norm; the last layer is read by a hook.

    Raises:
        ValueError: a layer id outside 0..L-1 (transformers would drop it silently).
    """
    layers = target_model.model.layers
    for i in layer_ids:
        if not 0 <= i < len(layers):
            raise ValueError(f"layer id {i} is not in 0..{len(layers) - 1}")
    last: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    handle = layers[-1].register_forward_hook(keep)
    try:
        with torch.no_grad():
            out = target_model(
                input_ids=torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True
            )
    finally:
        handle.remove()
    parts = []
    for i in layer_ids:
        part = last[0] if i == len(layers) - 1 else out.hidden_states[i + 1]
        parts.append(part[0].to(torch.float64))  # [T, D]
    return torch.cat(parts, dim=1)


# --- decoding ----------------------------------------------------------------------------------


def reference_plain(
    target_model: Any,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    choose: Choose,
) -> list[int]:
    """New tokens of plain decoding, one full forward each; a stop token is kept and ends it.

    The token at absolute position t is chosen from the logits at t - 1.
    """
    ids = list(prompt_ids)
    new: list[int] = []
    while len(new) < max_new_tokens:
        token = choose(reference_logits(target_model, ids)[-1], len(ids))
        ids.append(token)
        new.append(token)
        if token in stop_ids:
            break
    return new


def reference_draft(
    target_model: Any,
    drafter_state_dict: Mapping[str, Tensor],
    drafter_config: Mapping[str, Any],
    ids: Sequence[int],
    n_slots: int,
) -> list[int]:
    """The n_slots - 1 tokens that DFlash drafts after ids, whose last entry is the anchor.

    The block is [anchor, MASK x (n_slots - 1)] and the context every position before the anchor.
    Greedy at every temperature, ties to the lowest id; slot j predicts position anchor + j.
    """
    anchor = len(ids) - 1
    dflash = drafter_config["dflash_config"]
    features = reference_features(target_model, ids, dflash["target_layer_ids"])[:anchor]
    block = [ids[anchor]] + [dflash["mask_token_id"]] * (n_slots - 1)
    with torch.no_grad():
        embeddings = target_model.get_input_embeddings()(torch.tensor(block))
        hidden = reference_dflash(
            drafter_state_dict,
            drafter_config,
            features,
            embeddings,
            torch.arange(anchor, anchor + n_slots),
            torch.arange(anchor),
        )
        head = target_model.get_output_embeddings()
        logits = head(hidden.to(head.weight.dtype))  # [B, V]
    return [lowest_argmax(logits[j]) for j in range(1, n_slots)]


def lowest_argmax(logits: Tensor) -> int:
    """The lowest id among the largest entries of logits [V]."""
    return int(torch.nonzero(logits == logits.max())[0])


def reference_dflash_decode(
    target_model: Any,
    drafter_state_dict: Mapping[str, Tensor],
    drafter_config: Mapping[str, Any],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    choose: Choose,
    block_size: int,
    block_mode: str,
) -> tuple[list[int], list[int]]:
    """New tokens of DFlash decoding and the tokens committed in each cycle.

    The prefill gives the first token, which no cycle counts: for any non-empty answer
    sum(committed) + 1 == len(tokens). A cycle drafts, verifies the block in one forward over the
    whole sequence, accepts drafts while they equal the target's own choice, adds the bonus token,
    and cuts that at the first stop token (kept) and at the budget. Blocks are never shortened.

    Args:
        block_size: slots b, anchor included; 1 never calls the drafter.
        block_mode: `draft`, the drafter sees b slots; `verify`, it sees the trained block and
            only the first b slots are verified.

    Raises:
        ValueError: block size under 1, over the trained size in mode `verify`, unknown mode.
    """
    if block_mode not in BLOCK_MODES:
        raise ValueError(f"block_mode {block_mode!r} is not one of {BLOCK_MODES}")
    if block_size < 1:
        raise ValueError(f"block_size {block_size} is under 1")
    trained = drafter_config["block_size"]
    if block_mode == "verify" and block_size > trained:
        raise ValueError(f"block_size {block_size} is over the trained {trained} in mode verify")
    if max_new_tokens < 1:
        return [], []

    ids = list(prompt_ids)
    ids.append(choose(reference_logits(target_model, ids)[-1], len(ids)))
    committed: list[int] = []
    end = len(prompt_ids) + max_new_tokens
    while len(ids) < end and ids[-1] not in stop_ids:
        anchor = len(ids) - 1
        drafts: list[int] = []
        if block_size > 1:
            n_slots = trained if block_mode == "verify" else block_size
            seen = reference_draft(
                target_model, drafter_state_dict, drafter_config, list(ids), n_slots
            )
            drafts = seen[: block_size - 1]
        logits = reference_logits(target_model, ids + drafts)
        step: list[int] = []
        for j in range(1, block_size + 1):
            token = choose(logits[anchor + j - 1], anchor + j)
            step.append(token)
            if j == block_size or drafts[j - 1] != token:
                break  # this one is the bonus token
        kept: list[int] = []
        for token in step:
            if len(ids) + len(kept) == end:
                break
            kept.append(token)
            if token in stop_ids:
                break
        ids.extend(kept)
        committed.append(len(kept))
    return ids[len(prompt_ids) :], committed


# --- random weights ----------------------------------------------------------------------------


def random_drafter(
    target_config: Any,
    layer_ids: Sequence[int],
    n_layers: int,
    block_size: int,
    mask_token_id: int,
    seed: int,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A drafter with random float64 weights in the published form: (state dict, config).

    It has never learned anything, but fc leans towards the last feature and the attention's output
    outweighs the mask embedding, so a target that repeats itself accepts a draft now and then.

    Args:
        target_config: a Llama or Qwen3 config of transformers; the drafter takes its sizes.
        layer_ids: target layers whose outputs are the features.
    """
    width, inner = target_config.hidden_size, target_config.intermediate_size
    n_heads, n_kv = target_config.num_attention_heads, target_config.num_key_value_heads
    d = getattr(target_config, "head_dim", None) or width // n_heads
    n = len(layer_ids)
    config = {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "num_target_layers": target_config.num_hidden_layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv,
        "head_dim": d,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": target_config.vocab_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(layer_ids)},
    }
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        noise = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return noise * gain / math.sqrt(columns)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator, dtype=torch.float64)

    fc = matrix(width, n * width, 0.3)
    fc[:, (n - 1) * width :] += torch.eye(width, dtype=torch.float64)
    tensors = {"fc.weight": fc, "hidden_norm.weight": norm(width), "norm.weight": norm(width)}
    for layer in range(n_layers):
        v_proj = matrix(n_kv * d, width)
        # o_proj turns the values of each group back: o_proj . repeat(v_proj) leans to the identity
        repeated = v_proj.view(n_kv, d, width).repeat_interleave(n_heads // n_kv, dim=0)
        o_proj = 2 * repeated.reshape(n_heads * d, width).T + matrix(width, n_heads * d, 0.5)
        tensors |= {
            f"layers.{layer}.self_attn.q_proj.weight": matrix(n_heads * d, width),
            f"layers.{layer}.self_attn.k_proj.weight": matrix(n_kv * d, width),
            f"layers.{layer}.self_attn.v_proj.weight": v_proj,
            f"layers.{layer}.self_attn.o_proj.weight": o_proj,
            f"layers.{layer}.self_attn.q_norm.weight": norm(d),
            f"layers.{layer}.self_attn.k_norm.weight": norm(d),
            f"layers.{layer}.mlp.gate_proj.weight": matrix(inner, width),
            f"layers.{layer}.mlp.up_proj.weight": matrix(inner, width),
            f"layers.{layer}.mlp.down_proj.weight": matrix(width, inner, 0.5),
            f"layers.{layer}.input_layernorm.weight": norm(width),
            f"layers.{layer}.post_attention_layernorm.weight": norm(width),
        }
    return tensors, config
