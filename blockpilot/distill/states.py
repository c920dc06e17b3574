"""What a drafter in training reads of its target: features and inputs of the LM head.

Letters: T tokens of a conversation, R of them its response, F width of the features, D of the
target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot.base.devices import has_16_bit_products
from blockpilot.decoding.target import Target
from blockpilot.distill.corpus import Example


def states_of(
    target: Target, example: Example, layer_ids: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Features [T - 1, F] of all but the last token and the inputs [R, D] of the LM head that chose
    the response's tokens: stored, or by one target forward."""
    features, hidden = example.features, example.hidden
    if features is None or hidden is None:
        target.capture(layer_ids)
        with torch.inference_mode():
            ids = example.ids[:-1].to(target.device)
            answered = len(example.ids) - example.prompt_length
            forward = target.forward(ids, target.new_cache(len(ids)), n_logits=answered)
        assert forward.features is not None
        # The clones leave inference mode behind.
        features, hidden = forward.features.clone(), forward.hidden.clone()
    dtype = input_dtype(target)
    return features.to(target.device, dtype), hidden.to(target.device, dtype)


def input_dtype(target: Target) -> torch.dtype:
    """Of what a network in training reads: without autocast its own float32 needs the same."""
    widened = target.dtype.itemsize == 2 and not has_16_bit_products(target.device)
    return torch.float32 if widened else target.dtype
