"""The keyed sampler: the token at a position depends on the logits and a key, on nothing else.

At temperature T the token at absolute position t is argmax over v of
`logits_v + T * g(seed, prompt hash, t, v)` with Gumbel noise g from a counter-based hash, so the
same token comes out of a one-token forward, a block, a tree or batched `generate`, in any order
(Gumbel-max: Gumbel 1954; Maddison et al. 2014). T = 0 is the limit, not a special case.

Letters: n positions, V vocabulary rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from blockpilot.base.errors import UserError

_MASK32 = 0xFFFFFFFF
_CACHED = 2**16  # numbers of 8 bytes


def sampling_key(seed: int, prompt_hash: str) -> tuple[int, int]:
    """Two 32-bit words that stand for (seed, prompt hash) in the noise of every position."""
    digest = hashlib.sha256(f"{seed}/{prompt_hash}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def _mix(x: Tensor) -> Tensor:
    """Bijective 32-bit finaliser (xor-shift-multiply) on int64 tensors that hold 32-bit words."""
    # 32-bit word times a constant under 2^31 stays inside int64, so no device can differ.
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK32
    return x ^ (x >> 15)


def gumbel(key: Tensor, positions: Tensor, vocab: int, device: torch.device | str) -> Tensor:
    """Standard Gumbel noise [n, vocab] in float32.

    `key` [n, 2] or [2] from `sampling_key`, `positions` [n] absolute positions. Computed in float64
    and rounded once, so the last bit of a device's logarithm does not show.
    """
    key, positions = key.to(device), positions.to(device)
    row = _mix((positions & _MASK32) ^ key[..., 0])
    row = _mix(row ^ key[..., 1])
    word = _mix(torch.arange(vocab, device=device) ^ 0x9E3779B9)
    # A CPU does a dozen passes over what fits its cache faster than over all rows.
    chunk = max(1, _CACHED // vocab) if row.device.type == "cpu" else max(1, len(row))
    return torch.cat([_noise(word, part) for part in row.split(chunk)])


def _noise(word: Tensor, row: Tensor) -> Tensor:
    bits = _mix((_mix(word[None, :] ^ row[:, None]) + row[:, None]) & _MASK32)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


class KeyedSampler:
    """Chooses target tokens for one or several prompts by Gumbel-max with keyed noise.

    `temperature` >= 0; `top_k` 0 switches the filter off; `top_p` 1 likewise. Filters act on the
    logits before the noise, top-k first, and keep all ties of the last kept value.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        prompt_hashes: Sequence[str] = ("",),
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise UserError(f"decoding.temperature={temperature}: allowed are finite values >= 0")
        if top_k < 0:
            raise UserError(f"decoding.top_k={top_k}: allowed are 0 (off) and positive integers")
        if not 0 < top_p <= 1:
            raise UserError(f"decoding.top_p={top_p}: allowed are values in (0, 1]")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.keys = torch.tensor([sampling_key(seed, h) for h in prompt_hashes])  # [R, 2]

    @property
    def filters(self) -> bool:
        """Whether top-k or top-p leaves tokens out."""
        return bool(self.top_k) or self.top_p < 1

    def scores(self, logits: Tensor, positions: Tensor, row: int | None = 0) -> Tensor:
        """Perturbed scores [n, V] whose argmax is the token; float32 at least.

        `positions` [n] are those of the tokens being chosen (one past the logits' own). `row` picks
        the prompt; None means that logits row i belongs to prompt i.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.filters:
            scores = self._filtered(scores)
        if self.temperature == 0:  # adding 0 * noise would change nothing
            return scores
        key = self.keys if row is None else self.keys[row]
        noise = gumbel(key, positions, scores.shape[-1], scores.device)
        return scores + self.temperature * noise

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Tokens [n] int64 for logits [n, V]; ties go to the lowest id, -1 where not finite.

        No host sync: the -1 travels to the host with the tokens.
        """
        best = self.scores(logits, positions).max(dim=-1)
        return best.indices.masked_fill(~best.values.isfinite(), -1)

    def _filtered(self, scores: Tensor) -> Tensor:
        if 0 < self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -math.inf)
        if self.top_p < 1:
            ordered = scores.sort(dim=-1, descending=True).values
            # Shifting by the maximum keeps exp finite for every temperature, tiny ones included.
            shifted = (ordered - ordered[..., :1]) / max(self.temperature, 1e-9)
            mass = shifted.softmax(dim=-1).cumsum(dim=-1)
            last = (mass < self.top_p).sum(dim=-1, keepdim=True).clamp_max(scores.shape[-1] - 1)
            scores = scores.masked_fill(scores < ordered.gather(-1, last), -math.inf)
        return scores


class KeyedLogitsProcessor(LogitsProcessor):
    """The same sampler inside `generate(do_sample=False)`, for left-padded batches.

    `padding` [R] counts the pad tokens at the head of each row, so that positions are absolute.
    """

    def __init__(self, sampler: KeyedSampler, padding: Tensor) -> None:
        self.sampler, self.padding = sampler, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        positions = input_ids.shape[1] - self.padding
        return self.sampler.scores(scores, positions, row=None)
