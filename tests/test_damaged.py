"""Every file of a run that is read again: what is damaged is told in one line that names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from records_kit import make_row, make_settings, open_store
from safetensors.torch import load_file, save_file
from stages_kit import composed
from test_learning import separable

from blockpilot import pipeline, train
from blockpilot.base.errors import UserError
from blockpilot.costs.curve import CostCurve, CostPoint, load_cost
from blockpilot.decoding.anchors import Replay
from blockpilot.decoding.types import Block
from blockpilot.distill.corpus import Corpus
from blockpilot.distill.responses import SCHEMA
from blockpilot.evaluate.comparison import COMPARED, EVALUATED
from blockpilot.predictor.examples import load_examples, save_examples
from blockpilot.predictor.net import (
    BlockSizeNet,
    PredictorConfig,
    load_predictor,
    save_predictor,
)
from blockpilot.predictor.trainer import PredictorTrainer
from blockpilot.prompts.base import Prompt
from blockpilot.records.prefill import Prefill
from blockpilot.records.replays import Text
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.settings import keep_settings
from blockpilot.records.store import read_manifests, read_records
from blockpilot.report.runs import Run
from blockpilot.report.sections import evaluation_sections

KINDS: dict[str, Kind] = {}
NET = PredictorConfig((7, 8, 9), "draft", "logits", 6, 1, 0.0, "t", "abc", "float32", None, 5, 4)
ROW = make_row(1, 8)
STEP = ["report", "run_id=x", "runs=[x]"]


@dataclass
class Kind:
    """A kind of file: how a whole one is made and read, and the wrong values that it may hold."""

    made: Callable[[Path], Path]
    read: Callable[[Path], object]
    wrong: dict[str, Callable[[Any], Any]]  # new content from the old one, each refused


def kind(name: str, read: Callable[[Path], object], **wrong: Callable[[Any], Any]) -> Any:
    """Register how the kind of file called `name` is made."""

    def register(made: Callable[[Path], Path]) -> Callable[[Path], Path]:
        KINDS[name] = Kind(made, read, wrong)
        return made

    return register


def changed(**values: Any) -> Callable[[Any], Any]:
    return lambda raw: {**raw, **values}


def without(key: str) -> Callable[[Any], Any]:
    return lambda raw: {name: value for name, value in raw.items() if name != key}


def a_list(raw: Any) -> Any:
    return [raw]


@kind("settings.json", lambda file: keep_settings(file, {"a": 1}, what="responses"), list=a_list)
def settings(folder: Path) -> Path:
    keep_settings(folder / "settings.json", {"a": 1}, what="responses")
    return folder / "settings.json"


KINDS["settings.json of a replay"] = Kind(
    settings, lambda file: RunFolder(file.parent).predicted_by, {"list": a_list}
)


def steps_done(file: Path) -> object:
    """The one step is done, so none begins."""
    options = [
        "steps=[{report: ['run_id=x', 'runs=[x]']}]",
        f"paths.outputs={file.parents[2]}",
        "run_id=x",
    ]
    return pipeline.run(composed("pipeline", *options))


@kind(
    "steps.json",
    steps_done,
    no_list=lambda raw: 7,
    key=lambda raw: [{**raw[0], "x": 1}],
    type=lambda raw: [{**raw[0], "seconds": "long"}],
    nan=lambda raw: [{**raw[0], "seconds": float("nan")}],
)
def steps(folder: Path) -> Path:
    file = folder / "pipeline/x/steps.json"
    file.parent.mkdir(parents=True)
    step = {"stage": STEP[0], "overrides": [*STEP[1:], f"paths.outputs={folder}"], "seconds": 1.5}
    file.write_text(json.dumps([step]))
    return file


@kind("prompts.jsonl", lambda file: RunFolder(file.parent).prompts(), turns=changed(turns=[1]))
def prompts(folder: Path) -> Path:
    RunFolder(folder).keep_prompts([Prompt("s/1", "s", ("a text",), "test")])
    return folder / "prompts.jsonl"


@kind(
    "manifest.json",
    lambda file: read_manifests(file.parents[1]),
    list=a_list,
    sessions=changed(sessions=3),
    key=without("sessions"),
)
def manifest(folder: Path) -> Path:
    records(folder)
    return folder / "rank00/manifest.json"


@kind("part-", lambda file: read_records(file.parents[1]))
def records(folder: Path) -> Path:
    with open_store(folder) as store:
        store.append([ROW])
    return next((folder / "rank00").glob("part-*.parquet"))


@kind(
    "set_1",
    lambda file: RunFolder(file.parents[1]).prefill(ROW),
    shape=changed(logits=torch.ones(2, 2)),
)
def prefill(folder: Path) -> Path:
    return RunFolder(folder).keep_prefill(
        make_settings(1, 8), Prefill(torch.ones(9), torch.ones(4))
    )


@kind("set_1 of a replay", lambda file: RunFolder(file.parents[1]).replay(ROW), key=without("ids"))
def replay(folder: Path) -> Path:
    found = Replay({Block(3, 3): torch.zeros(2, dtype=torch.int16)}, None)
    return RunFolder(folder).keep_replay(make_settings(1, 8), Text([1, 2, 3], 1), found, None)


@kind(
    "cost.json",
    lambda file: load_cost(file, {}),
    list=a_list,
    none=changed(points=[]),
    type=changed(points=7),
    key=without("machine"),
    nan=lambda raw: {**raw, "points": [{**raw["points"][0], "cycle_s": float("nan")}]},
    text=lambda raw: {**raw, "points": [{**raw["points"][0], "context": "x"}]},
)
def cost(folder: Path) -> Path:
    points = [CostPoint(8, 64, 3, *[0.1] * 7)]
    (folder / "cost.json").write_text(CostCurve({}, {}, points).to_json())
    return folder / "cost.json"


def report(file: Path) -> object:
    return list(evaluation_sections(Run(RunFolder(file.parent), "evaluate", "e")))


@kind(
    "evaluation.csv",
    report,
    column=lambda table: table.drop(columns="unit"),
    text=lambda table: table.assign(gain="much"),
)
def evaluation(folder: Path) -> Path:
    line = dict.fromkeys(EVALUATED, 1.0) | {"prompt_set": "all", "method": "net", "unit": "tau"}
    pd.DataFrame([line]).to_csv(folder / "evaluation.csv", index=False)
    return folder / "evaluation.csv"


@kind(
    "timed.csv",
    report,
    column=lambda table: table.drop(columns="speedup"),
    text=lambda table: table.assign(speedup="much"),
)
def timed(folder: Path) -> Path:
    evaluation(folder)
    words = ("set", "method", "block_mode", "policy", "best_fixed")
    line = dict.fromkeys(COMPARED, 1.0) | dict.fromkeys(words, "x")
    pd.DataFrame([line]).to_csv(folder / "timed.csv", index=False)
    return folder / "timed.csv"


@kind(
    "origin.json",
    lambda file: load_examples(file.parent),
    list=a_list,
    sizes=changed(sizes=[6, 8]),
    type=changed(sharpness="x"),
    key=without("runs"),
)
def origin(folder: Path) -> Path:
    save_examples(separable(3, 0), folder)
    return folder / "origin.json"


@kind("examples", lambda file: load_examples(file.parents[1]))
def examples(folder: Path) -> Path:
    origin(folder)
    return next((folder / "examples").glob("*.arrow"))


@kind(
    "config.json",
    lambda file: load_predictor(file.parent),
    list=a_list,
    type=changed(hidden="6"),
    sizes=changed(sizes=8),
    order=changed(sizes=[9, 8, 7]),
    mode=changed(block_mode="both"),
    features=changed(features="smell"),
    dropout=changed(dropout=1.5),
    nan=changed(dropout=float("nan")),
    key=without("target"),
    unknown=changed(colour="red"),
)
def config(folder: Path) -> Path:
    save_predictor(BlockSizeNet(NET), folder)
    return folder / "config.json"


@kind(
    "model.safetensors",
    lambda file: load_predictor(file.parent),
    nan=lambda tensors: {**tensors, "head.bias": torch.full((3,), torch.nan)},
    shape=lambda tensors: {**tensors, "head.bias": torch.zeros(4)},
    dtype=lambda tensors: {**tensors, "head.bias": torch.zeros(3, dtype=torch.int32)},
)
def weights(folder: Path) -> Path:
    config(folder)
    return folder / "model.safetensors"


def resumed(file: Path) -> object:
    cfg = composed("train", "dataset=x", "run_id=x", "device=cpu")
    trainer = PredictorTrainer(
        BlockSizeNet(NET), train.optimisation(cfg), file.parent, torch.device("cpu")
    )
    if not file.exists():
        trainer._save()
    return trainer.resume("")


@kind(
    "checkpoint.pt",
    resumed,
    key=without("best"),
    list=a_list,
    net=changed(net={}),
    shape=lambda raw: {**raw, "best": {**raw["best"], "head.bias": torch.zeros(4)}},
)
def checkpoint(folder: Path) -> Path:
    resumed(folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


@kind(
    "shard-0.parquet",
    lambda file: Corpus([file]),
    column=lambda table: table.drop(columns="prompt_set"),
)
def responses(folder: Path) -> Path:
    row = {"prompt_id": "p", "prompt_hash": "h", "prompt_set": "s"}
    row |= {"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}
    pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), folder / "shard-0.parquet")
    tensors = {"features": torch.zeros(4, 2), "hidden": torch.zeros(3, 2)}
    save_file(tensors, folder / "shard-0.safetensors")
    return folder / "shard-0.parquet"


@kind(
    "shard-0.safetensors",
    lambda file: Corpus([file.with_suffix(".parquet")]),
    key=without("hidden"),
    rows=changed(features=torch.zeros(3, 2)),
)
def features(folder: Path) -> Path:
    return responses(folder).with_suffix(".safetensors")


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    """Write what `change` makes of the content of a file."""
    if file.suffix in (".json", ".jsonl"):
        file.write_text(json.dumps(change(json.loads(file.read_text()))) + "\n")
    elif file.suffix == ".csv":
        change(pd.read_csv(file)).to_csv(file, index=False)
    elif file.suffix == ".parquet":
        change(pd.read_parquet(file)).to_parquet(file)
    elif file.suffix == ".pt":
        torch.save(change(torch.load(file, weights_only=True)), file)
    else:
        save_file(change(load_file(file)), file)


def damages() -> Iterator[Any]:
    for name, each in KINDS.items():
        for damage in ("empty", "half", "cut", *each.wrong):
            yield pytest.param(name, damage, id=f"{name}-{damage}")


@pytest.mark.parametrize(("name", "damage"), list(damages()))
def test_a_damaged_file_is_told_in_one_line_that_names_it(
    tmp_path: Path, name: str, damage: str
) -> None:
    file = KINDS[name].made(tmp_path)
    KINDS[name].read(file)
    content = file.read_bytes()
    if damage in ("empty", "half", "cut"):
        kept = {"empty": 0, "half": len(content) // 2, "cut": len(content) - 2}[damage]
        file.write_bytes(content[:kept])
    else:
        edit(file, KINDS[name].wrong[damage])
    with pytest.raises(UserError) as caught:
        KINDS[name].read(file)
    told = str(caught.value)
    assert name.split(" ")[0] in told
    assert str(tmp_path) in told
    assert "\n" not in told
