"""Block drafters of published forms, run by their packages (scripts/form_fixtures.py)."""

from __future__ import annotations

import json
from typing import Any

import torch
from form_fixtures_kit import (
    ANCHOR,
    LAYERS,
    MASK,
    ROWS,
    SLIDING,
    TAPS,
    Z_LAB,
    B,
    C,
    D,
    Target,
    V,
    fill,
    greedy,
    keep,
    keep_saved,
)
from torch import Tensor
from transformers import Qwen3Config


def of_dflash() -> None:
    """z-lab's forms."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    own = Z_LAB["dflash_config"]
    scaled = {
        "input_embedding_scale": 3.5,
        "output_multiplier": 0.3,
        "final_logit_softcapping": 5.0,
    }
    second = {
        "conv_group_size": 4,
        "conv_kernel_size": 2,
        "selector_rank": 8,
        "selector_top_k": 6,
        "block_size": B,
        "output_multiplier": 0.3,
        "final_logit_softcapping": 5.0,
    }
    for name, more, kind in (
        ("plain", {}, DFlashDraftModel),
        ("scaled", {"dflash_config": own | scaled}, DFlashDraftModel),
        ("sliding", SLIDING, DFlashDraftModel),
        ("sliding-whole", SLIDING | {"is_causal": False}, DFlashDraftModel),
        ("causal-whole", {"is_causal": True}, DFlashDraftModel),
        ("causal", SLIDING | {"is_causal": True}, DFlashDraftModel),
        (
            "second",
            SLIDING
            | {
                "is_causal": False,
                "architectures": ["DFlash2DraftModel"],
                "dflash_config": own | second,
            },
            DFlash2DraftModel,
        ),
    ):
        target, config = Target(), {**Z_LAB, **more}
        network = kind(Qwen3Config(**config)).float().eval()
        fill(network)
        scale = config["dflash_config"].get("input_embedding_scale", 1.0)
        hidden = network(
            position_ids=torch.arange(C + B)[None],
            noise_embedding=(target.embedding[target.block] * scale)[None],
            target_hidden=target.features[None],
        )[:, 1:]
        logits = network.compute_logits(hidden, target.lm_head)[0]
        drafts = logits.argmax(dim=-1)
        if kind is DFlash2DraftModel:
            drafts = network.propose(hidden, target.block[:1], target.lm_head, 0.0)[0].flatten()
        weights = {
            key.replace("codebook.weight", "codebook"): each
            for key, each in network.state_dict().items()
        }
        keep(
            f"dflash-{name}",
            config,
            weights,
            target,
            hidden=hidden[0],
            logits=logits,
            drafts=drafts,
        )


# --- specforge ---------------------------------------------------------------------------------


def of_specforge() -> None:
    """Domino and DSpark behind z-lab's layers."""
    from specforge.modeling.draft.domino import DominoDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    domino = {"projector_type": "domino", "emb_dim": 12, "gru_hidden_dim": 20}
    shifts = {"shift_label": True, "pure_draft_prefix_len": 1}
    dspark = {"projector_type": "dspark", "markov_rank": 8}
    for name, more, kind in (
        ("domino", domino | shifts, DominoDraftModel),
        ("domino-filling", domino, DominoDraftModel),
        ("dspark", dspark, DSparkDraftModel),
        ("dspark-gated", dspark | {"markov_head_type": "gated"}, DSparkDraftModel),
        ("dspark-rnn", dspark | {"markov_head_type": "rnn"}, DSparkDraftModel),
    ):
        target = Target()
        config = {**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], **more}}
        shape = Qwen3Config(**json.loads(json.dumps(config)))
        shape._attn_implementation = "sdpa"
        network = kind(shape).float().eval()
        fill(network)
        hidden = network(
            position_ids=torch.arange(C + B)[None],
            noise_embedding=target.embedding[target.block][None],
            target_hidden=target.features[None],
        )
        first = 0 if "shift_label" in more or kind is DSparkDraftModel else 1
        base = target.lm_head(hidden)[None]

        def logits_of(
            tokens: list[int],
            network: Any = network,
            hidden: Tensor = hidden,
            base: Tensor = base,
            first: int = first,
            target: Target = target,
            kind: Any = kind,
        ) -> Tensor:
            # What is read before each slot; those without a token yet decide nothing so far.
            chosen = [ANCHOR, *tokens, *[0] * B][:B]
            before = chosen if first == 0 else [ANCHOR, *chosen][:B]
            ids = torch.tensor(before if kind is DSparkDraftModel else chosen)[None, None]
            found = network.apply_logits_head(
                base,
                prev_token_ids=ids,
                prev_token_embeddings=target.embedding[ids],
                hidden_states=hidden[None],
            )
            return found[0, 0, first:]

        logits, drafts = greedy(logits_of, first)
        keep(
            f"specforge-{name}",
            config,
            dict(network.state_dict()),
            target,
            hidden=hidden[0, first:],
            logits=logits,
            drafts=drafts,
        )


# --- speculators -------------------------------------------------------------------------------


def of_speculators() -> None:
    """speculators' own forms."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    small = {"draft_vocab_size": ROWS}
    dspark = small | {"markov_rank": 8, "confidence_head_with_markov": True}
    second = {"draft_vocab_size": V, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 6}
    for name, kind, shape, more, window in (
        ("dflash", DFlashDraftModel, DFlashSpeculatorConfig, small, {}),
        ("dflash-whole", DFlashDraftModel, DFlashSpeculatorConfig, {"draft_vocab_size": V}, {}),
        ("dflash-causal", DFlashDraftModel, DFlashSpeculatorConfig, small, SLIDING),
        (
            "dflash-shifting",
            DFlashDraftModel,
            DFlashSpeculatorConfig,
            small | {"sliding_window_non_causal": True, "sample_from_anchor": True},
            SLIDING,
        ),
        ("dflash2", DFlash2DraftModel, DFlash2SpeculatorConfig, second, SLIDING),
        ("dspark", DSparkDraftModel, DSparkSpeculatorConfig, dspark, {}),
        (
            "dspark-gated",
            DSparkDraftModel,
            DSparkSpeculatorConfig,
            dspark | {"markov_head_type": "gated", "sample_from_anchor": False},
            {},
        ),
        (
            "dspark-rnn",
            DSparkDraftModel,
            DSparkSpeculatorConfig,
            dspark | {"markov_head_type": "rnn"},
            {},
        ),
    ):
        target = Target()
        layers = Qwen3Config(**LAYERS, **window)
        layers._attn_implementation = "eager"
        config = shape(
            transformer_layer_config=layers,
            block_size=B,
            aux_hidden_state_layer_ids=[i + 1 for i in TAPS],
            mask_token_id=MASK,
            **more,
        )
        network = kind(config).float().eval()
        fill(network)
        ids = torch.arange(V)
        with torch.no_grad():
            network.embed_tokens.weight.copy_(target.embedding)
            if config.draft_vocab_size == V:
                network.lm_head.weight.copy_(target.head)
            else:
                ids = torch.randperm(V, generator=torch.Generator().manual_seed(2))[:ROWS]
                ids = ids.sort().values
                known = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
                network.load_vocab_mappings(known, ids - torch.arange(ROWS))
        # One document of which only the anchor's position counts; what lies behind it is not seen.
        length = C + 2 * B
        place = torch.arange(length)
        features = torch.cat([target.features, torch.zeros(2 * B, len(TAPS) * D)])[None]
        states, logits, *_ = network._backbone_forward(
            features,
            torch.where(place == C, ANCHOR, 0)[None],
            (place == C).float()[None],
            torch.zeros(1, length, D),
            torch.zeros(1, length, dtype=torch.int64),
            max_anchors=1,
        )
        first = 0 if config.sample_from_anchor else 1

        def logits_of(
            tokens: list[int],
            network: Any = network,
            states: Tensor = states,
            logits: Tensor = logits,
            first: int = first,
            kind: Any = kind,
        ) -> Tensor:
            chosen = torch.tensor([ANCHOR, *tokens, *[0] * B][:B])
            before = chosen if first == 0 else torch.cat([chosen[:1], chosen[:-1]])
            if kind is DSparkDraftModel:
                bias = network.markov_head.block_bias(
                    prev_token_ids=before[None], hidden_states=states
                )
                return (logits + bias)[0, first:]
            if kind is DFlash2DraftModel:
                top, scores = network.candidate_selector.select(logits, states, before[None])
                return torch.full_like(logits, -1e9).scatter(-1, top, scores)[0, first:]
            return logits[0, first:]

        found, drafts = greedy(logits_of, first, ids)
        if kind is DFlash2DraftModel:  # scores of the candidates alone
            found = logits[0, first:]
        made = {"hidden": states[0, first:], "logits": found, "drafts": drafts}
        keep_saved(f"speculators-{name}", network, target, **made)
