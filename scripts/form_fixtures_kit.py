"""What the fixtures of scripts/form_fixtures.py have in common: shapes, a target, files."""

from __future__ import annotations

import json
import tempfile
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"

V, D, C, B, N_LAYERS, ROWS, ANCHOR = 61, 32, 23, 5, 2, 40, 5
TAPS = [1, 3]  # in the count of z-lab
MASK = V - 1
CONTEXT = [(7 * place + 3) % V for place in range(C)]  # tokens before the anchor
LAYERS: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": D,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": N_LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": V,
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
    "max_window_layers": 0,
}
Z_LAB = {
    **LAYERS,
    "architectures": ["DFlashDraftModel"],
    "block_size": B,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
}


class Target:
    """What a drafter takes of its target: random rows, and features behind C positions."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(V, D, generator=draw)
        self.head = 0.3 * torch.randn(V, D, generator=draw)
        self.features = torch.randn(C, len(TAPS) * D, generator=draw)
        self.block = torch.tensor([ANCHOR] + [MASK] * (B - 1))

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T

    @property
    def model(self) -> Any:
        """As packages look for an embedding."""
        return types.SimpleNamespace(embed_tokens=lambda ids: self.embedding[ids])


def fill(network: nn.Module) -> None:
    """Random weights in which a wrong norm, offset or scale shows."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            noise = 0.3 * torch.randn(weight.shape, generator=draw)
            weight.copy_(noise + 1 if "norm" in name else noise)


def keep(
    name: str, config: dict[str, Any], weights: dict[str, Tensor], target: Target, **made: Tensor
) -> None:
    """Write a fixture."""
    folder = FIXTURES / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(
        {key: each.contiguous() for key, each in weights.items()}, folder / "model.safetensors"
    )
    given = {"features": target.features, "embedding": target.embedding, "head": target.head}
    save_file(
        {**given, "anchor": torch.tensor([ANCHOR]), "context": torch.tensor(CONTEXT)},
        FIXTURES / "target.safetensors",
    )
    tensors = {key: each.detach().contiguous() for key, each in made.items()}
    package = name.split("-")[0]
    about = {"package": f"{package} {version(package)}"}
    save_file(tensors, FIXTURES / f"{name}.safetensors", metadata=about)


def greedy(logits_of: Callable[[list[int]], Tensor], first: int, ids: Tensor | None = None) -> Any:
    """Logits [S, rows] and tokens [S] of a chain that is chosen slot by slot.

    `logits_of` gives those of all slots from `first` on, behind the tokens chosen so far.
    """
    tokens: list[int] = []
    n_slots = B - first
    for slot in range(n_slots):
        best = int(logits_of(tokens)[slot].argmax())
        tokens.append(best if ids is None else int(ids[best]))
    return logits_of(tokens), torch.tensor(tokens)


def keep_saved(name: str, network: Any, target: Target, **made: Tensor) -> None:
    """Write a fixture of a network that its package can save."""
    with tempfile.TemporaryDirectory() as saved:
        network.save_pretrained(saved)
        config = json.loads((Path(saved) / "config.json").read_text())
        keep(name, config, load_file(Path(saved) / "model.safetensors"), target, **made)
