"""Tensors of a published block drafter under the names that the network has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.drafters.forms.dflash import DFlashConfig

_PREFIXES = (
    ("model.", ""),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("logit_head.", ""),
    ("candidate_selector.", "path.candidate_selector."),
    ("markov_head.", "path."),
    ("prefix_gru.", "path.prefix_gru."),
    ("embed_proj.", "path.embed_proj."),
)
_CONFIDENCE = "confidence_head."  # cuts drafts, which here policies do


def network_tensors(
    config: DFlashConfig, weights: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """The tensors for `fill_network`, without those that follow from others.

    Raises UserError for a draft vocabulary that the target does not hold.
    """
    found: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        name = key
        for prefix, ours in _PREFIXES:
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
        if name in found:
            raise UserError(f"drafter {where}: two tensors are {name}, one of them {key}")
        found[name] = tensor
    if config.form in ("DeepSpec", "SpecForge dspark", "speculators dspark"):
        found = {key: value for key, value in found.items() if not key.startswith(_CONFIDENCE)}
    if config.form.startswith("speculators"):
        _draft_vocabulary(config, found, where)
    return found


def _draft_vocabulary(config: DFlashConfig, found: dict[str, Tensor], where: str) -> None:
    """Check the tables of ids and take out those that the network does not hold."""
    rows, size = config.draft_vocab_size, config.layers.vocab_size
    offsets, known = found.get("d2t"), found.pop("t2d", None)
    if rows is None or rows == size:
        if offsets is not None:
            if offsets.any():
                raise UserError(f"drafter {where}: d2t moves ids, but the head has all of them")
            del found["d2t"]
        return
    if offsets is None or offsets.shape != (rows,) or offsets.is_floating_point():
        return  # told with the other shapes
    ids = torch.arange(rows) + offsets
    if ids.min() < 0 or ids.max() >= size:
        raise UserError(f"drafter {where}: d2t leads outside the target's vocabulary")
    if known is not None:
        meant = torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
        if known.shape != meant.shape or not torch.equal(known.bool(), meant):
            raise UserError(f"drafter {where}: d2t and t2d name different draft vocabularies")
