"""Tiny drafters of published forms, made and run by the packages that define the forms.

    python scripts/form_fixtures.py        # remakes tests/fixtures/

The packages go into a temporary folder; what their imports want and nothing here calls is faked.
target.safetensors is what all of them read: `features` [C, n * D] of positions 0..C-1, `embedding`
and `head` [V, D], and the `anchor`'s token, at position C. A fixture is a folder, config.json and
model.safetensors as published, and beside it <name>.safetensors with what the package makes of it:
`hidden` [S, D] of the drafting slots, `logits` [S, rows] along the chain that it drafts, and
`drafts` [S] as target ids.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config

PACKAGES = ("dflash==0.1.0", "speculators==0.9.0", "specforge==0.2.0")
FAKED = ("openai", "hs_connectors")  # clients of servers
FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"

V, D, C, B, N_LAYERS, ROWS, ANCHOR = 61, 32, 23, 5, 2, 40, 5
TAPS = [1, 3]  # in the count of z-lab
MASK = V - 1
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


class Fake(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class FakeFinder:
    """Finds the faked packages and all below them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in FAKED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Fake:
        return Fake(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


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
    save_file({**given, "anchor": torch.tensor([ANCHOR])}, FIXTURES / "target.safetensors")
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


# --- dflash ------------------------------------------------------------------------------------


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
    """Its block drafters, and EAGLE-3 heads by `eagle3_of_speculators`."""
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
        with tempfile.TemporaryDirectory() as saved:
            network.save_pretrained(saved)
            config_file = json.loads((Path(saved) / "config.json").read_text())
            from safetensors.torch import load_file

            weights = load_file(Path(saved) / "model.safetensors")
        keep(
            f"speculators-{name}",
            config_file,
            weights,
            target,
            hidden=states[0, first:],
            logits=found,
            drafts=drafts,
        )


MAKERS = {"dflash": of_dflash, "specforge": of_specforge, "speculators": of_speculators}


def main() -> None:
    """Install the packages aside, then make the fixtures in a process that finds them."""
    if len(sys.argv) > 1:
        sys.meta_path.append(FakeFinder())  # type: ignore[arg-type]
        with torch.no_grad():
            MAKERS[sys.argv[1]]()
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, *PACKAGES], check=True)
        for name in MAKERS:
            environment = os.environ | {"PYTHONPATH": folder}
            subprocess.run([sys.executable, __file__, name], check=True, env=environment)


if __name__ == "__main__":
    main()
