"""Muon for the inner matrices of a drafter, AdamW for the rest; the work split over ranks.

Orthogonalizing the momentum of every matrix costs as much as a fifth of a step and each rank would
do all of it, so each rank updates its share of the matrices and sends the result to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

# Building an optimizer imports this, and functions in it keep as their default the process group
# that exists at their import: its threads would outlive destroy_process_group and could abort the
# process at its end. Imported here, there is no group yet.
import torch.distributed.fsdp
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import get_cosine_schedule_with_warmup

from blockpilot.app.config import TrainingConfig
from blockpilot.base.devices import has_16_bit_products

HEAD_RATE = 0.1
"""Learning rate of rows that belong to tokens, of the others': they begin as the target's or at
zero, and AdamW moves the rows of tokens that are hardly ever seen as fast as all others."""

_OF_TOKENS = ("lm_head", "token_rows")  # names of such tables


class _InFloat32(TorchFunctionMode):
    """Muon orthogonalizes in bfloat16; a CPU without such products takes ten times as long for it
    as for the forward and backward of a step."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0].clone()  # it is worked on in place
        return func(*args, **(kwargs or {}))


class DrafterOptimizer:
    """Steps with a cosine schedule; one learning rate serves matrices and gains.

    Muon (Jordan et al., 2024) is scaled to the root mean square of AdamW's update. Gradients must
    be equal on all ranks, as data-parallel training leaves them.
    """

    def __init__(self, network: nn.Module, settings: TrainingConfig) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        named = dict(network.named_parameters())
        # Rows that belong to tokens are seen more or less often: AdamW's business.
        heads = [w for name, w in named.items() if name.startswith(_OF_TOKENS)]
        inner = [w for name, w in named.items() if w.ndim == 2 and not name.startswith(_OF_TOKENS)]
        self._shares = shares(inner, self._world)
        rate, decay, scaling = settings.learning_rate, settings.weight_decay, "match_rms_adamw"
        # The gains come first: a rank may have no share of the matrices.
        groups: list[dict[str, Any]] = [{"params": [w for w in named.values() if w.ndim != 2]}]
        if heads:
            groups.append({"params": heads, "lr": HEAD_RATE * rate})
        adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=decay)
        self._parts: list[Any] = [adam]
        fast = has_16_bit_products(next(network.parameters()).device)
        self._products: AbstractContextManager[object] = nullcontext() if fast else _InFloat32()
        if mine := self._shares[self._rank]:
            muon = torch.optim.Muon(mine, lr=rate, weight_decay=decay, adjust_lr_fn=scaling)
            self._parts.append(muon)
        warmup = round(settings.warmup * settings.steps)
        self._parts += [
            get_cosine_schedule_with_warmup(part, warmup, settings.steps) for part in self._parts
        ]

    @property
    def learning_rate(self) -> float:
        """Of the coming step."""
        return float(self._parts[-1].get_last_lr()[0])

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients, the same on every rank afterwards."""
        with self._products:
            for part in self._parts:
                part.step()
        if self._world > 1:
            for owner, share in enumerate(self._shares):
                for weight in share:
                    dist.broadcast(weight, src=owner)

    def state(self) -> list[Any]:
        """States of all ranks, in their order; every rank has to ask."""
        return list(gather_object([[part.state_dict() for part in self._parts]]))

    def load(self, states: Sequence[Any]) -> None:
        """Continue from what `state` gave to the same number of ranks."""
        for part, state in zip(self._parts, states[self._rank], strict=True):
            part.load_state_dict(state)


def shares(matrices: Sequence[Tensor], n: int) -> list[list[Tensor]]:
    """Divide matrices among n ranks: the largest first, each to the rank with the least work.

    The work of orthogonalizing an a x b matrix, a <= b, grows as a^2 b.
    """
    done, given = [0] * n, [list[Tensor]() for _ in range(n)]
    for matrix in sorted(matrices, key=_work, reverse=True):
        rank = done.index(min(done))
        done[rank] += _work(matrix)
        given[rank].append(matrix)
    return given


def _work(matrix: Tensor) -> int:
    return min(matrix.shape) ** 2 * max(matrix.shape)
