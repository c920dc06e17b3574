"""EAGLE-3 heads in speculators' form, run by its layers, and its reading of what is exported here
(scripts/form_fixtures.py).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from form_fixtures_kit import CONTEXT, LAYERS, ROWS, TAPS, Target, V, fill, keep_saved
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from blockpilot.drafters.dflash_load import random_network
from blockpilot.drafters.eagle3 import random_head
from blockpilot.drafters.forms.checkpoints import (
    read_checkpoint,
    save_checkpoint,
    write_checkpoint,
)
from blockpilot.drafters.forms.speculators import exported

N_DRAFTS = 4


def heads_of_speculators() -> None:
    """Chains of single tokens behind the features, with the heads' further norms and layers."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    for name, shape, n_layers, more in (
        ("eagle3", LlamaConfig, 1, {}),
        (
            "eagle3-normed",
            Qwen3Config,
            1,
            {"norm_before_residual": True, "norm_before_fc": True},
        ),
        ("eagle3-deep", LlamaConfig, 2, {"fc_norm": True, "norm_output": True}),
    ):
        target = Target()
        layers = shape(**LAYERS | {"num_hidden_layers": n_layers, "model_type": shape.model_type})
        layers._attn_implementation = "eager"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=ROWS,
            eagle_aux_hidden_state_layer_ids=[i + 1 for i in TAPS],
            **more,
        )
        network = Eagle3DraftModel(config).float().eval()
        fill(network)
        network.embed_tokens.weight.copy_(target.embedding)
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(2))[:ROWS].sort().values
        known = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
        network.load_vocab_mappings(known, ids - torch.arange(ROWS))

        features = target.features
        if network.input_norm is not None:
            features = network.input_norm(features)
        if network.fc_norm is not None:
            parts = features.chunk(len(TAPS), dim=-1)
            norms = zip(network.fc_norm, parts, strict=True)
            features = torch.cat([norm(part) for norm, part in norms], dim=-1)
        states, tokens = network.fc(features), [*CONTEXT[1:], int(target.block[0])]
        logits: list[Tensor] = []
        for _ in range(N_DRAFTS):
            output = _last_output(network, states, torch.tensor(tokens))
            normed = network.norm(output)
            logits.append(network.lm_head(normed))
            tokens.append(int(ids[logits[-1].argmax()]))
            carried = normed if config.norm_output else output
            states = torch.cat([states, carried[None]])
        made = {"logits": torch.stack(logits), "drafts": torch.tensor(tokens[-N_DRAFTS:])}
        keep_saved(f"speculators-{name}", network, target, **made)


def _last_output(network: Any, states: Tensor, tokens: Tensor) -> Tensor:
    """What the layers make of the last row [D], which sees all before it."""
    n = len(tokens)
    x = torch.cat([network.embed_tokens(tokens), states], dim=-1)[None]
    places = torch.arange(1, n + 1)[None]
    turns = network.rotary_emb(x, places)
    mask = torch.full((n, n), torch.finfo(x.dtype).min).triu(1)[None, None]
    for layer in network.layers:
        x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=turns)
    last: Tensor = x[0, -1]
    return last


def read_exports() -> None:
    """Refuse (AssertionError) an export that the package reads otherwise than it was meant."""
    from speculators.models.dflash import DFlashDraftModel
    from speculators.models.eagle3 import Eagle3DraftModel

    shape = LlamaConfig(**LAYERS | {"num_hidden_layers": 6, "model_type": "llama"})
    target: Any = SimpleNamespace(name="t", config=shape, embedding_scale=1.0, embed_rows=V)
    for reader, network in (
        (DFlashDraftModel, random_network(target)),
        (Eagle3DraftModel, random_head(target)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
            save_checkpoint(network, network.config.published(), ours)
            config, weights = exported(*read_checkpoint(str(ours)), "t", ["LlamaForCausalLM"])
            write_checkpoint(config, weights, theirs)
            read = reader(reader.config_class.from_pretrained(theirs))
            told = read.load_state_dict(weights, strict=False)
        assert not told.unexpected_keys, told.unexpected_keys
        left = [key for key in told.missing_keys if not key.startswith(("verifier_", "embed_"))]
        assert left in ([], ["lm_head.weight"]), left
        taps = [i - 1 for i in read.target_layer_ids]
        assert taps == list(network.config.target_layer_ids)
