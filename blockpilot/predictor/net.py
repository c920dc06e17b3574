"""The predictor of a block size from the target's prefill, and what it reads (arXiv 2606.31315).

Letters: P prompts, V vocabulary rows, D width of the target, F features, m sizes.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import fitted
from blockpilot.decoding.types import BLOCK_MODES

FEATURES = ("logits", "normalized", "softmax", "top_k", "hidden", "summary")
TOP = 64  # candidates of the features `top_k`
_MASS = 10  # candidates whose mass is part of `summary`


@dataclass(frozen=True)
class PredictorConfig:
    """A predictor's identity: what it chooses among, what it reads, whom it belongs to."""

    sizes: tuple[int, ...]  # increasing
    block_mode: str
    features: str
    hidden: int
    depth: int  # hidden layers; 0 is a linear map
    dropout: float
    target: str
    target_fingerprint: str  # of its weights as they were loaded, in `dtype`
    dtype: str
    drafter: str | None  # its fingerprint
    vocab_size: int  # rows of the target's LM head, padded ones included: they are read as they are
    hidden_size: int  # of the target
    label: str = "argmax"
    objective: str = "tau"
    data: str = ""  # where the examples came from


def n_features(config: PredictorConfig) -> int:
    """F for one kind of features."""
    kinds = {"hidden": config.hidden_size, "summary": 5, "top_k": min(TOP, config.vocab_size)}
    return kinds.get(config.features, config.vocab_size)


def features_of(kind: str, logits: Tensor, hidden: Tensor, n_prompt_tokens: Tensor) -> Tensor:
    """Features [P, F] in float32 of prefill logits [P, V], hidden states [P, D], lengths [P].

    The same function serves training and the policy. `logits` are the paper's raw ones; `summary`
    holds the entropy, the best probability, the gap of the two best logits, the mass of the ten
    best and the logarithm of the prompt's length.
    """
    logits = logits.float()
    if kind == "logits":
        return logits
    if kind == "normalized":
        return F.layer_norm(logits, logits.shape[-1:])
    if kind == "softmax":
        return logits.softmax(dim=-1)
    if kind == "hidden":
        return hidden.float()
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(TOP, logits.shape[-1]), dim=-1).values
    if kind == "top_k":
        return top
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    gap, mass = top[..., 0] - top[..., 1], top[..., :_MASS].exp().sum(dim=-1)
    length = n_prompt_tokens.to(logits).log()
    return torch.stack([entropy, top[..., 0].exp(), gap, mass, length], dim=-1)


class BlockSizeNet(nn.Module):
    """h1 = drop(relu(W1 x)), then residual layers h + drop(relu(W h)), then a linear head.

    The paper's net has depth 2 and width 2048. Inputs are shifted and scaled by buffers that the
    training sets; they start as the identity, which is what raw logits keep.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.config = config
        widths = [n_features(config), *[config.hidden] * config.depth]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], len(config.sizes))
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("shift", torch.zeros(widths[0]))
        self.register_buffer("scale", torch.ones(widths[0]))
        for layer in self.layers:
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        nn.init.xavier_uniform_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Scores [P, m] of features [P, F]."""
        x = (x - self.shift) * self.scale
        for index, layer in enumerate(self.layers):
            h = self.dropout(F.relu(layer(x)))
            x = x + h if index else h
        return self.head(x)


def save_predictor(net: BlockSizeNet, folder: Path) -> None:
    """Write config.json and float32 safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(net.config), indent=1) + "\n")
    weights = {key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()}
    scratch = folder / "model.safetensors.tmp"
    scratch.write_bytes(save(weights, metadata={"format": "pt"}))  # save_file: for its user alone
    scratch.rename(folder / "model.safetensors")


def load_predictor(folder: Path) -> BlockSizeNet:
    """The predictor of a folder. Raises UserError when it is missing, misshapen or not finite."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = fitted(PredictorConfig, raw)
        for key, fits in _sensible(config).items():
            if not fits:
                raise ValueError(f"{key} is {getattr(config, key)}")
    except (OSError, ValueError) as error:
        raise UserError(f"policy {folder}: no predictor in config.json ({error})") from error
    try:
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"policy {folder}: cannot read model.safetensors ({error})") from error
    net = BlockSizeNet(config)
    wanted = {key: list(value.shape) for key, value in net.state_dict().items()}
    found = {key: list(value.shape) for key, value in weights.items()}
    if wanted != found:
        key = next(k for k in {*wanted, *found} if wanted.get(k) != found.get(k))
        raise UserError(
            f"policy {folder}: model.safetensors: {key} has shape {found.get(key)}, config.json "
            f"means {wanted.get(key)}"
        )
    for key, value in weights.items():
        if not (value.is_floating_point() and value.isfinite().all()):
            raise UserError(f"policy {folder}: model.safetensors: {key} holds values not finite")
    net.load_state_dict(weights)
    return net.eval()


def _sensible(config: PredictorConfig) -> dict[str, bool]:
    """Whether the values of a configuration can be a predictor's, by key."""
    sizes = config.sizes
    return {
        "sizes": bool(sizes) and sizes[0] >= 1 and list(sizes) == sorted(set(sizes)),
        "block_mode": config.block_mode in BLOCK_MODES,
        "features": config.features in FEATURES,
        "hidden": config.hidden >= 1,
        "depth": config.depth >= 0,
        "dropout": 0 <= config.dropout < 1,
        "vocab_size": config.vocab_size >= 1,
        "hidden_size": config.hidden_size >= 1,
    }


def parameters_of(net: nn.Module) -> int:
    """Trained numbers of a module."""
    return sum(weight.numel() for weight in net.parameters())
