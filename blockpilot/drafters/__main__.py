"""What a checkpoint of a drafter is: its form, the target it wants, what of it is used.

    python -m blockpilot.drafters <folder, hub repository or bundled:name>

Nothing is decoded and no target is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.drafters.eagle3 import fill_head
from blockpilot.drafters.eagle3_net import Eagle3Network
from blockpilot.drafters.forms.checkpoints import fill_network, read_checkpoint
from blockpilot.drafters.forms.config import ANY_VALUE
from blockpilot.drafters.forms.dflash import DFlashConfig
from blockpilot.drafters.forms.dflash_tensors import network_tensors
from blockpilot.drafters.forms.eagle3 import Eagle3Config, head_tensors

Fact = tuple[str, str]

_DEEP = 1 << 16  # layers of a target that a head does not tell


def described(checkpoint: str) -> list[Fact]:
    """What to know of a checkpoint, in the order in which it is read.

    Raises UserError, in the words of a stage that loads it, where it cannot be used.
    """
    raw, weights = read_checkpoint(checkpoint, pickles=True)
    own = head_tensors(weights, checkpoint)
    if "midlayer.self_attn.q_proj.weight" in own and "hidden_norm.weight" not in own:
        facts = _eagle3_head(checkpoint, raw, own)
    else:
        facts = _block_drafter(checkpoint, raw, weights)
    without = [key for key in raw if key in ANY_VALUE]
    if "speculators_config" in raw:
        without.append("speculators_config")
    return [*facts, ("without effect", ", ".join(without) or "nothing")]


def _block_drafter(
    checkpoint: str, raw: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> list[Fact]:
    config = DFlashConfig.parse(raw, checkpoint, tensors=weights)
    network = DFlashNetwork(config)
    used = network_tensors(config, weights, checkpoint)
    fill_network(network, used, checkpoint)
    layers, drafts = config.layers, config.trained_slots - 1
    slots = (
        "every slot drafts the token behind it" if config.shift else "the anchor's slot is unused"
    )
    own = [
        name
        for name, there in (("embedding", config.embeds), ("head", config.draft_vocab_size))
        if there
    ]
    facts = [
        ("form", f"{config.form}, a block drafter"),
        ("target", _target(raw, config.num_target_layers, layers.hidden_size, layers.vocab_size)),
        ("reads layers", ", ".join(map(str, config.target_layer_ids))),
        ("block", f"{config.block_size} slots, {drafts} drafts: {slots}"),
        ("layers", f"{layers.num_hidden_layers} of width {layers.hidden_size}{_sights(config)}"),
        ("mask token", str(config.mask_token_id)),
        ("path", "no slot knows what another chose" if config.path is None else config.path.kind),
        ("of its own", " and ".join(own) or "nothing: embedding and head are the target's"),
        ("parameters", f"{sum(weight.numel() for weight in network.parameters()):,}"),
    ]
    if left := sorted(key for key in weights if key.startswith("confidence_head.")):
        facts.append(("not used", f"{', '.join(left)}: a policy decides how much is verified"))
    return [*facts, ("use", f"drafter=dflash drafter.checkpoint={checkpoint}")]


def _eagle3_head(
    checkpoint: str, raw: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> list[Fact]:
    layers = raw.get("transformer_layer_config", raw)
    depth = layers.get("num_target_layers") or _DEEP
    config = Eagle3Config.parse(raw, weights, checkpoint, depth)
    network = Eagle3Network(config)
    fill_head(network, weights, checkpoint, config.layer.vocab_size)
    shape, taps = config.layer, config.feature_width // len(config.target_layer_ids)
    named = any(key.endswith("layer_ids") for key in (*raw, *(raw.get("eagle_config") or {})))
    read = ", ".join(map(str, config.target_layer_ids))
    norms = ("norm_queries", "norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
    further = ", ".join(name for name in norms if getattr(config, name))
    own = [
        name for name, there in (("embedding", config.embeds), ("head", config.own_head)) if there
    ]
    rows = f"{config.draft_vocab_size} of {shape.vocab_size} tokens"
    return [
        ("form", f"{config.form}, an EAGLE-3 head"),
        ("target", _target(raw, None, taps, shape.vocab_size)),
        ("reads layers", read if named else "not named: 1, L / 2 - 1 and L - 4 of L"),
        ("layers", f"{shape.num_hidden_layers} of width {shape.hidden_size}"),
        ("further norms", further or "none"),
        ("drafts", rows),
        ("of its own", " and ".join(own) or "nothing: embedding and head are the target's"),
        ("parameters", f"{sum(weight.numel() for weight in network.parameters()):,}"),
        ("use", f"drafter=eagle3 drafter.checkpoint={checkpoint}"),
    ]


def _sights(config: DFlashConfig) -> str:
    found = []
    for n, sight in enumerate(config.sights):
        parts = ["causal"] if sight.causal else []
        if sight.window is not None:
            start = "the anchor" if sight.from_anchor else "each slot"
            parts.append(f"window {sight.window} from {start}")
        if parts:
            found.append(f"{n}: {', '.join(parts)}")
    return f" ({'; '.join(found)})" if found else ""


def _target(raw: Mapping[str, Any], depth: int | None, width: int, vocabulary: int) -> str:
    name = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    told = f"width {width}, vocabulary {vocabulary}"
    return (f"{name}, " if name else "") + (f"{depth} layers, " if depth else "") + told


def main(arguments: list[str] | None = None) -> int:
    """Print the facts; exit status 2 and one line where the checkpoint cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m blockpilot.drafters", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("checkpoint", help="folder, hub repository or bundled:<name>")
    try:
        facts = described(parser.parse_args(arguments).checkpoint)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
