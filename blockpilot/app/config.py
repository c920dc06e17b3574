"""Schemas of the stages' configurations, and the checks that run before any weight is loaded.

A stage composes its YAML with Hydra and hands the result to `typed`, which merges it into the
stage's schema. That names every unknown key (Hydra lets `+modle=x` through), every missing one and
every wrong value, each in one line with what is allowed. The schemas hold no defaults: those live
in YAML. Components (`drafter`, `policy`, `recipe`, `tracker`, `prompts.sets`) are `Any` here, for
the constructor of a component is its schema.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from blockpilot.app.explain import explain
from blockpilot.app.repo import adopt_repo, drop_drafter
from blockpilot.app.rules import validate
from blockpilot.base.errors import UserError


@dataclass
class ModelConfig:
    """Facts that identify a target: one file of conf/model."""

    name: str
    repo: str  # on the hub, or a local folder
    revision: str | None
    package: str | None  # Python package that carries `gguf`
    gguf: str | None  # file inside `package` or `repo`
    dtype: str
    attention: str
    thinking: bool | None  # None: the template has no thinking mode
    template_date: str  # what a chat template is told when it asks for today's date
    drafters: dict[str, str | None]
    architecture: dict[str, Any]  # values of the Hugging Face config, for weights=random


@dataclass
class DecodingConfig:
    """How the target's own tokens are chosen."""

    max_new_tokens: int
    temperature: float  # 0: greedy
    top_k: int  # 0: off
    top_p: float  # 1: off


@dataclass
class PromptsConfig:
    """Which prompts a stage reads."""

    sets: dict[str, Any]
    limit: int | None
    path: str | None
    folder: str | None
    split: str | None


@dataclass
class PathsConfig:
    """Where results go."""

    outputs: str


@dataclass
class JobConfig:
    """What every stage needs."""

    paths: PathsConfig
    run_id: str
    seed: int
    threads: int | None


@dataclass
class StageConfig(JobConfig):
    """What every stage that loads a target needs."""

    model: ModelConfig
    decoding: DecodingConfig
    device: str
    dtype: str
    attention: str
    weights: str


@dataclass
class PolicyPath:
    """Where a trained policy lies."""

    path: str | None


@dataclass
class CostConfig(StageConfig):
    """Schema of conf/cost.yaml."""

    plan: bool
    engine: str
    drafter: Any
    sizes: list[int]
    trees: list[int]
    copies: list[int]
    contexts: list[int]
    batch: list[int]  # sequences at once
    repeats: int
    policy: PolicyPath
    tracker: Any


@dataclass
class ReplayConfig:
    """How a replayed sweep goes about it."""

    batch_size: int  # prompts answered together
    memory_gb: float | None  # for the drafts of one chunk of anchors; null: an eighth of the free
    marginals: bool  # keep rank and top candidates of every slot of the trained block
    keep_features: bool  # keep the target features that the drafter read


@dataclass
class PolicyFiles(PolicyPath):
    """What policies of a sweep read."""

    pilot: str | None
    cost: str | None


@dataclass
class SweepConfig(StageConfig):
    """Schema of conf/sweep.yaml."""

    plan: bool
    engine: str
    mode: str
    replay: ReplayConfig
    cost: str | None  # file of a cost curve, for predicted times
    prompts: PromptsConfig
    drafter: Any
    policy: PolicyFiles
    methods: dict[str, Any]  # policies beside the fixed sizes, by the name of the method
    tracker: Any
    radius: int
    sizes: list[int]
    tree_nodes: list[int]  # proposed tokens of DDTree, a method tree<n> each
    block_mode: str


@dataclass
class DatasetConfig(JobConfig):
    """Schema of conf/dataset.yaml."""

    runs: list[str]  # folders of sweeps
    sizes: list[int] | None  # candidates, 1 included or not
    radius: int | None  # k: candidates B-k..B+k; null, and no sizes: all drafted ones of the runs
    label: str
    objective: str
    sharpness: float  # of label=soft, as a share of the best fixed size's mean gain
    cost: str | None  # cost curve, for objective=throughput


@dataclass
class PredictorSettings:
    """Shape and inputs of a predictor."""

    features: str
    hidden: int
    depth: int
    dropout: float


@dataclass
class TrainConfig(JobConfig):
    """Schema of conf/train.yaml."""

    dataset: str | None
    runs: list[str]  # folders of replayed sweeps, for a pilot
    cost: str | None  # cost curve, for a pilot
    device: str
    tracker: Any
    predictor: PredictorSettings
    epochs: int
    patience: int | None
    batch_size: int
    learning_rate: float
    shuffle_labels: bool  # a control: what a predictor that cannot know anything gets


@dataclass
class EvaluateConfig(JobConfig):
    """Schema of conf/evaluate.yaml."""

    dataset: str | None
    runs: list[str]  # folders of replayed sweeps
    policies: list[str]
    cost: str | None
    over: list[str]
    timed: str | None  # folder of a decoded sweep
    tracker: Any


@dataclass
class ReportConfig(JobConfig):
    """Schema of conf/report.yaml."""

    runs: list[str]  # folders of sweeps, evaluations and cost curves


@dataclass
class PipelineRecords:
    """Schema of conf/records: sweeps that several experiments learn from and are scored on.

    Overrides are lists of text, which may nest.
    """

    name: str  # the sweeps' run ids are those of `sweep_ids`
    model: str | None  # a file of conf/model; null: no records
    temperature: float
    seeds: list[int]  # every split is swept once with each
    options: list[Any]  # overrides of every step that loads the target
    test: list[Any]  # overrides that choose the test prompts
    timed: int  # test prompts per set that are decoded and timed
    policies: list[Any]  # overrides for policies that decide every cycle
    steps: list[Any]  # before the sweeps
    sweeps: dict[str, list[Any]]  # overrides by split
    runs: str  # folders of all sweeps, with commas between them
    scored: str  # those of the test split


@dataclass
class PipelineConfig(JobConfig):
    """Schema of conf/pipeline.yaml."""

    plan: bool
    processes: int  # of a step that several may share
    records: PipelineRecords  # its steps come first
    steps: list[Any]  # {stage: overrides} each
    extra: dict[str, list[str]]  # further overrides for every step of a stage


def sweep_ids(name: str, splits: Iterable[str], seeds: Sequence[int]) -> list[str]:
    """Run ids of the sweeps of `records`, seed by seed: <name>-<split>[-<seed>, if several]."""
    suffixes = [f"-{seed}" for seed in seeds] if len(seeds) > 1 else [""]
    return [f"{name}-{split}{suffix}" for suffix in suffixes for split in splits]


# For YAML: ${sweep_ids:name,[policy,test],[0,1]} gives them with commas between, as in key=[...].
OmegaConf.register_new_resolver(
    "sweep_ids", lambda *arguments: ",".join(sweep_ids(*arguments)), replace=True
)


@dataclass
class SelfWrittenConfig:
    """A prompt set that the target writes itself."""

    count: int  # begun; what does not end properly is dropped
    opening: str  # how every prompt begins; may be empty


@dataclass
class ResponsesConfig:
    """How the target answers the prompts that a drafter learns from."""

    limit: int | None  # prompts per set, the first by hash; null: all
    limit_of: dict[str, int]  # other limits for some sets
    validation: int  # prompts per set whose answers measure held-out tau
    self_written: dict[str, SelfWrittenConfig]  # by the name of the set
    batch_size: int
    store_features: bool  # false: recompute them in every step


@dataclass
class NewDrafterConfig:
    """What drafters of every kind have."""

    name: str | None
    block_size: int


@dataclass
class TrainingConfig:
    """Optimisation of a drafter of any kind."""

    init: str | None  # drafter whose weights training continues from; null: random ones
    steps: int
    sequences_per_step: int  # per process
    anchors_per_sequence: int
    learning_rate: float
    weight_decay: float
    warmup: float  # share of the steps
    clip: float
    compile: str | None  # backend of torch.compile; null: no compilation
    log_every: int
    evaluate_every: int


@dataclass
class DistillConfig(StageConfig):
    """Schema of conf/distill.yaml."""

    plan: bool
    prompts: PromptsConfig
    tracker: Any
    export: str | None
    drafter: (
        str | None
    )  # null: the group's choice is the recipe's; a drafter's own settings mean nothing here
    recipe: Any  # what only drafters of the chosen kind need
    responses: ResponsesConfig
    new_drafter: NewDrafterConfig
    training: TrainingConfig


@dataclass
class GenerateConfig(StageConfig):
    """Schema of conf/generate.yaml."""

    engine: str
    drafter: Any
    policy: Any
    block_mode: str
    block_size: int | None
    prompt: str | None
    prompt_file: str | None


Schema = TypeVar("Schema", bound=JobConfig)


def as_typed(overrides: Iterable[str]) -> list[str]:
    """Overrides for Hydra with run ids quoted that it would read as numbers: 1_1 as 11, 007 as 7.

    Ids with commas between them, of a multirun, are quoted one by one.
    """
    parser = OverridesParser.create()

    def text(run_id: str) -> str:
        read = parser.parse_override(f"run_id={run_id}").value()
        return run_id if isinstance(read, str) else f"'{run_id}'"

    found = [
        (each, re.fullmatch(r"(\+{0,2}run_id=)([\w.-]+(?:,[\w.-]+)*)", each)) for each in overrides
    ]
    return [
        each if parts is None else parts[1] + ",".join(map(text, parts[2].split(",")))
        for each, parts in found
    ]


def typed(cfg: DictConfig, schema: type[Schema]) -> Schema:
    """Merge a composed configuration into its schema and check every value.

    Returns:
        A read-only DictConfig of the type `schema`, interpolations resolved.

    Raises:
        UserError: a key is unknown or missing, or a value is of the wrong type or out of range.
    """
    try:
        if isinstance(run_id := OmegaConf.select(cfg, "run_id"), int | float):
            raise UserError(f"run_id={run_id}: read as a number; write it as \"run_id='1_1'\"")
        merged = OmegaConf.merge(OmegaConf.structured(schema), cfg)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"no value for {', '.join(missing)}")
        adopted = issubclass(schema, StageConfig) and adopt_repo(merged)
        OmegaConf.resolve(merged)
        if adopted and not issubclass(schema, DistillConfig):  # there it is one to be made
            drop_drafter(merged)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    validate(merged)
    OmegaConf.set_readonly(merged, True)
    return cast(Schema, merged)
