"""Laws of the configuration: schemas say what is wrong; files agree with each other and code."""

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ReadonlyConfigError
from stages_kit import SCHEMAS
from transformers import AutoConfig, AutoModelForCausalLM

from blockpilot.app.config import JobConfig, ModelConfig, StageConfig, typed
from blockpilot.app.help import stage_help
from blockpilot.app.rules import validate
from blockpilot.base.errors import UserError
from blockpilot.base.paths import conf_dir

MODELS = sorted((conf_dir() / "model").glob("*.yaml"))
DEFAULT = "smollm2-135m"
GROUPS = ("drafter", "policy", "recipe", "tracker", "prompts")
COMPONENTS = sorted(path for group in GROUPS for path in (conf_dir() / group).glob("*.yaml"))
# Parameters in the published checkpoints: an architecture with one wrong number has another count.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-14b": 14_768_307_200,
    "qwen3-30b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-coder-30b": 30_532_122_624,
    "llama3.3-70b": 70_553_706_496,
    "gpt-oss-20b": 20_914_757_184,
}


def stage_yaml() -> dict[str, Any]:
    """Return a configuration that fits StageConfig."""
    return {
        "model": OmegaConf.load(conf_dir() / "model" / f"{DEFAULT}.yaml"),
        "decoding": {"max_new_tokens": 8, "temperature": 0, "top_k": 0, "top_p": 1.0},
        "paths": {"outputs": "outputs"},
        "run_id": "test",
        "seed": 0,
        "device": "cpu",
        "dtype": "auto",
        "attention": "sdpa",
        "weights": "pretrained",
        "threads": None,
    }


def stage_config(*overrides: str) -> DictConfig:
    """Return `stage_yaml` with dotted overrides, unchecked as Hydra hands it over."""
    return OmegaConf.merge(stage_yaml(), OmegaConf.from_dotlist(list(overrides)))


def test_a_valid_configuration_is_merged_resolved_and_read_only() -> None:
    cfg = typed(stage_config("seed=3", "run_id=${paths.outputs}-x"), StageConfig)
    assert cfg.seed == 3
    assert isinstance(cfg.decoding.temperature, float)
    assert OmegaConf.to_container(cfg, resolve=False)["run_id"] == "outputs-x"
    with pytest.raises(ReadonlyConfigError):
        cfg.seed = 4


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("modle=x", ["unknown key modle", "did you mean model?", "decoding", "weights"]),
        ("decoding.temprature=1", ["unknown key decoding.temprature", "max_new_tokens, temp"]),
        ("model.drafter=x", ["unknown key model.drafter", "did you mean drafters?"]),
        ("seed=abc", ["seed", "abc"]),
        ("decoding=3", ["decoding", "3"]),
        ("run_id=${nowhere}", ["run_id", "nowhere"]),
        ("decoding.max_new_tokens=-1", ["decoding.max_new_tokens=-1", "a number >= 0"]),
        ("decoding.temperature=-0.1", ["decoding.temperature=-0.1", "a number >= 0"]),
        ("decoding.temperature=nan", ["decoding.temperature=nan", "a number >= 0"]),
        ("decoding.temperature=.inf", ["decoding.temperature=inf", "a number >= 0"]),
        ("decoding.top_k=-1", ["decoding.top_k=-1", "a number >= 0"]),
        ("decoding.top_p=0", ["decoding.top_p=0", "> 0 and <= 1"]),
        ("decoding.top_p=1.5", ["decoding.top_p=1.5", "> 0 and <= 1"]),
        ("seed=-1", ["seed=-1", ">= 0"]),
        ("threads=0", ["threads=0", ">= 1"]),
        ("device=gpu", ["device=gpu", "auto, cpu, cuda"]),
        ("dtype=fp16", ["dtype=fp16", "float32, bfloat16, float16, float64"]),
        ("model.dtype=auto", ["model.dtype=auto", "float32, bfloat16"]),
        ("attention=flash", ["attention=flash", "sdpa, eager"]),
        ("weights=none", ["weights=none", "pretrained, random"]),
        ("paths.outputs=' '", ["paths.outputs", "a folder"]),
        ("run_id=../x", ["run_id=../x", "letters"]),
        ("run_id=1_1", ["run_id=11: read as a number", "\"run_id='1_1'\""]),
    ],
)
def test_a_wrong_key_or_value_is_refused_in_one_line(override: str, told: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        typed(stage_config(override), StageConfig)
    message = str(caught.value)
    assert "\n" not in message
    for part in told:
        assert part in message


NEITHER_END = {int: (-(10**12), 10**12), float: (-1e12, 1e12, math.inf, -math.inf, math.nan)}


def numbers(kind: Any) -> Iterator[tuple[str, Any, type]]:
    """Numeric leaves below a type: dotted key, the tree around a value for it, int or float."""
    if kind in (int, float):
        yield "", lambda wrong: wrong, kind
    elif is_dataclass(kind):
        for name, inner in get_type_hints(kind).items():
            for key, tree, leaf in numbers(inner):
                yield f".{name}{key}", lambda wrong, n=name, t=tree: {n: t(wrong)}, leaf
    elif get_origin(kind) is dict:
        for key, tree, leaf in numbers(get_args(kind)[1]):
            yield f".x{key}", lambda wrong, t=tree: {"x": t(wrong)}, leaf
    else:  # a list, or optional
        for inner in get_args(kind):
            for key, tree, leaf in numbers(inner):
                listed = get_origin(kind) is list
                yield key, (lambda wrong, t=tree: [t(wrong)]) if listed else tree, leaf


@pytest.mark.parametrize("stage", SCHEMAS)
def test_every_number_of_a_stage_has_a_range_with_two_ends(stage: str) -> None:
    found = list(numbers(SCHEMAS[stage]))
    assert {".seed", ".threads"} <= {key for key, _, _ in found}
    for key, tree, kind in found:
        for wrong in NEITHER_END[kind]:
            # nothing else is in the tree, so it is this key's rule that refuses
            with pytest.raises(UserError, match="must be") as caught:
                validate(OmegaConf.create(tree(wrong)))
            assert str(caught.value).startswith(key.split(".x")[0][1:]), key


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_number_of_a_component_has_a_range_with_two_ends(path: Path) -> None:
    for node in components(OmegaConf.load(path)):
        for name, kind in get_type_hints(get_class(node._target_).__init__).items():
            for _, tree, leaf in numbers(kind):
                for wrong in (*NEITHER_END[leaf], "many"):
                    component = {"_target_": node._target_, name: tree(wrong)}
                    with pytest.raises(UserError, match=rf"methods.x.policy.{name}=.*: must be"):
                        validate(OmegaConf.create({"methods": {"x": {"policy": component}}}))


def test_a_component_that_reads_a_file_is_given_text() -> None:
    for key in ("checkpoint", "path", "cost"):
        with pytest.raises(UserError, match=f"drafter.{key}=7: must be text"):
            validate(OmegaConf.create({"drafter": {"_target_": "x", key: 7}}))


def test_a_missing_key_is_named() -> None:
    cfg = stage_yaml()
    del cfg["seed"]
    del cfg["decoding"]["top_p"]
    with pytest.raises(UserError, match=r"no value for decoding\.top_p, seed"):
        typed(OmegaConf.create(cfg), StageConfig)


@pytest.mark.parametrize("value", ["block_size=0", "sizes=[4,0]", "radius=-1", "block_mode=both"])
def test_stage_specific_values_are_checked(value: str) -> None:
    with pytest.raises(UserError, match=value.split("=")[0]):
        validate(OmegaConf.from_dotlist([value]))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_model_file_is_complete_and_its_architecture_is_the_published_one(path: Path) -> None:
    model = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(path))
    assert not OmegaConf.missing_keys(model)
    assert model.name == path.stem
    assert set(model.drafters) == {"dflash", "eagle3", "specblock"}
    values = dict(OmegaConf.to_container(model.architecture))
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert sum(weight.numel() for weight in built.parameters()) == PARAMETERS[path.stem]
    for key in ("head_dim", "max_position_embeddings", "rms_norm_eps", "eos_token_id"):
        assert getattr(config, key) == values[key]
    assert config.rope_parameters["rope_theta"] == values["rope_theta"]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_plus_model_leaves_nothing_of_the_default_behind(path: Path, tmp_path: Path) -> None:
    """`+model=x` is laid over the default, so a key that x lacks would keep the default's value."""
    (tmp_path / "stage.yaml").write_text(f"defaults: [_self_, model/{DEFAULT}]\n")
    (tmp_path / "model").symlink_to(conf_dir() / "model")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("stage", overrides=[f"+model={path.stem}"])
    assert cfg.model == OmegaConf.load(path)


def components(node: Any) -> list[DictConfig]:
    """Return every node with a `_target_` in a YAML tree."""
    if isinstance(node, DictConfig):
        inner = [found for key in node for found in components(node._get_node(key))]
        return ([node] if "_target_" in node else []) + inner
    return []


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_keys_of_a_component_are_its_keyword_only_arguments(path: Path) -> None:
    """No key without an argument, no argument without a key, no default outside YAML."""
    found = components(OmegaConf.load(path))
    assert found, "no component in the file"
    for node in found:
        parameters = list(inspect.signature(get_class(node._target_)).parameters.values())
        assert all(each.kind is each.KEYWORD_ONLY for each in parameters)
        assert all(each.default is each.empty for each in parameters)
        assert {each.name for each in parameters} == {
            str(key) for key in node if not str(key).startswith("_")
        }


@pytest.mark.parametrize(
    "path", sorted((conf_dir() / "prompts").glob("*.yaml")), ids=lambda p: p.stem
)
def test_a_prompt_file_adds_one_set_of_its_own_name(path: Path) -> None:
    """So that `prompts=[a,b]` merges."""
    assert path.read_text().startswith("# @package prompts.sets\n")
    assert list(OmegaConf.load(path)) == [path.stem]


# Data: what other files explain, or what names its own meaning.
DATA = (
    "_target_",
    "defaults",
    "hydra",
    "architecture",
    "drafters",
    "formats",
    "extra",
    "steps",
    "sweeps",
)


def uncommented(file: Path) -> list[str]:
    """Dotted keys of a YAML with no comment beside them and none above."""
    lines = file.read_text().splitlines()
    root = yaml.compose(file.read_text())
    first = root.start_mark.line

    def walk(node: Any, path: str) -> Iterator[str]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            n, name = key.start_mark.line, key.value
            if name in DATA:
                continue
            beside = " # " in lines[n]
            above = n > first and lines[n - 1].lstrip().startswith("# ")
            a_set = file.parent.name == "prompts" and not path  # its head says what it is
            if not (beside or above or a_set):
                yield path + name
            yield from walk(value, f"{path}{name}.")

    return list(walk(root, ""))


def test_every_key_has_a_comment() -> None:
    """Experiments are left out: they set keys that are explained where they stand."""
    files = [file for file in conf_dir().rglob("*.yaml") if file.parent.name != "experiment"]
    assert len(files) > len(MODELS) + len(COMPONENTS)
    found = {str(file.relative_to(conf_dir())): uncommented(file) for file in files}
    assert {name: keys for name, keys in found.items() if keys} == {}


@pytest.mark.parametrize("stage", SCHEMAS)
def test_help_shows_every_key_with_its_comment(stage: str) -> None:
    shown = stage_help(stage)
    for key in get_type_hints(SCHEMAS[stage]):
        if key not in ("model", "drafter", "recipe", "policy", "tracker", "records"):  # groups
            assert re.search(rf"^{key}:", shown, re.MULTILINE), key
    assert "seed: 0 # of the sampler" in shown
    assert ("model: gpt-oss-20b" in shown) == issubclass(SCHEMAS[stage], StageConfig)


def test_schemas_hold_no_defaults() -> None:
    for schema in [JobConfig, *JobConfig.__subclasses__(), *StageConfig.__subclasses__()]:
        for each in fields(schema):
            assert each.default is MISSING, f"{schema.__name__}.{each.name}"
            assert each.default_factory is MISSING, f"{schema.__name__}.{each.name}"
