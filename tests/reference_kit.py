"""Random float64 targets and token choices for the tests of the slow reference.

Letters in shapes as in reference.py. Needs nothing of the package under test.
"""

from typing import Any

import reference as ref
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
