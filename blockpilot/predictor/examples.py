"""Labelled examples of block sizes: what a predictor sees of a prompt, and each size's gain.

Letters: P examples (see `example_names`), V vocabulary rows, D width of the target, m sizes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset, Features, List, Value, load_from_disk
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.json_values import first_line, fitted
from blockpilot.costs.curve import CostCurve, load_cost
from blockpilot.prompts.base import DISTILL, POLICY, SPLITS, TEST, VALIDATION
from blockpilot.prompts.splits import near_duplicate_groups
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN, SHARED_FIELDS
from blockpilot.stats.tau import example_names, example_taus, half_taus

log = logging.getLogger(__name__)

_OWN = ("drafter_checkpoint", "block_mode", "trained_block_size")


@dataclass(frozen=True)
class Origin:
    """What all examples of a dataset share."""

    sizes: tuple[int, ...]
    target: str
    target_parameters: int
    drafter: str | None
    block_mode: str
    label: str
    objective: str
    sharpness: float
    runs: tuple[str, ...]
    settings: dict[str, Any]  # those that all rows share, by the records' column names
    cost: str | None  # digest of the curve that tokens per second are by


@dataclass(frozen=True)
class Examples:
    """Examples of one split or of all, in the order of their names."""

    origin: Origin
    example: list[str]  # name: the prompt, with the turn and the seed where they matter
    prompt_id: list[str]
    prompt_set: list[str]
    split: list[str]
    logits: Tensor  # [P, V]
    hidden: Tensor  # [P, D]
    n_prompt_tokens: Tensor  # [P]
    gains: Tensor  # [P, m] tau, or tokens per second
    seconds: Tensor  # [P, m] of a cycle, ones where the gain is tau
    first_half: Tensor  # [P, m] the gain from the first half of each answer; NaN: has no halves
    second_half: Tensor  # [P, m]

    def __len__(self) -> int:
        return len(self.prompt_id)

    def digest(self) -> str:
        """Twelve hex digits that change with the examples and with what is asked of them."""
        found = hashlib.sha256(json.dumps([asdict(self.origin), self.example, self.split]).encode())
        for name in _TENSORS:
            found.update(getattr(self, name).contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()[:12]

    @property
    def learnt(self) -> Examples:
        """Those of the split `policy`, for labels and the best fixed size."""
        return self.of(POLICY)

    @property
    def held_out(self) -> Examples:
        """Those of the split `validation`."""
        return self.of(VALIDATION)

    @property
    def test(self) -> Examples:
        """Those of the split `test`."""
        return self.of(TEST)

    def of(self, split: str) -> Examples:
        """Those of one split."""
        keep = [index for index, name in enumerate(self.split) if name == split]
        values: dict[str, Any] = {}
        for name in _STRINGS:
            values[name] = [getattr(self, name)[index] for index in keep]
        for name in _TENSORS:
            values[name] = getattr(self, name)[keep]
        return Examples(self.origin, **values)


_STRINGS = ("example", "prompt_id", "prompt_set", "split")
_MATRICES = ("gains", "seconds", "first_half", "second_half")
_TENSORS = ("logits", "hidden", "n_prompt_tokens", *_MATRICES)


def gather(
    folders: Sequence[Path],
    frames: Sequence[pd.DataFrame],
    *,
    sizes: Sequence[int] | None,
    radius: int | None,
    label: str,
    objective: str,
    sharpness: float,
    cost: str | None,
) -> Examples:
    """Examples from the records of runs, one frame per folder; runs may differ in seeds and sets.

    Prompts that a drafter was trained on are left out. Raises UserError when nothing is left, runs
    differ in what must be one, a size was not measured, or a prompt lies in two splits. `cost` is
    the file of a cost curve of the same pair, for objective=throughput.
    """
    records = pd.concat(frames, ignore_index=True)
    records = records[(records["status"] == "ok") & (records["split"] != DISTILL)]
    # Other policies pick sizes of their own: their rows are no measurement of a size.
    records = records[records["policy"] == "fixed"]
    records = records[~records["prompt_id"].isin(leaks(folders, records))]
    drafted = records[records["method"] != PLAIN]
    if drafted.empty:
        raise UserError("runs: no decoded or replayed prompt outside the distill split")
    shared = [field for field in SHARED_FIELDS if field != "seed"]
    for field in (*shared, *_OWN):
        values = sorted(map(str, drafted[field].unique()))
        if len(values) > 1:
            raise UserError(
                f"runs differ in {field} ({', '.join(values)}): one dataset, one pair, one setting"
            )
    for prompt, splits in records.groupby("prompt_hash")["split"]:
        if splits.nunique() > 1:
            raise UserError(
                f"prompt {prompt} lies in several splits ({', '.join(sorted(splits.unique()))})"
            )
    measured = sorted(int(size) for size in records["block_size"].unique())
    first = drafted.iloc[0]
    if sizes and radius is not None:
        raise UserError(f"sizes={list(sizes)} and radius={radius} are both given; give one")
    trained = int(first["trained_block_size"])
    cut = first["block_mode"] == "verify"
    if radius is not None:
        widest = trained if cut else trained + radius
        chosen = list(range(max(1, trained - radius), widest + 1))
    else:
        chosen = sorted(set(sizes)) if sizes else [size for size in measured if size > 1]
    if missing := sorted(set(chosen) - set(measured)):
        raise UserError(f"sizes={list(chosen)}: the runs measured {measured}, not {missing}")
    curve = None
    if objective == "throughput":
        if cost is None:
            raise UserError("objective=throughput: give cost=<file of python -m blockpilot.cost>")
        pair = {name: first[name] for name in ("target", "drafter", "temperature")}
        curve = load_cost(cost, pair)
    origin = Origin(
        sizes=tuple(chosen),
        target=str(first["target"]),
        target_parameters=RunFolder(folders[0]).target_parameters(),
        drafter=first["drafter_checkpoint"],
        block_mode=str(first["block_mode"]),
        label=label,
        objective=objective,
        sharpness=sharpness,
        runs=tuple(map(str, folders)),
        settings=json.loads(first[shared].to_json()),
        cost=None if curve is None else curve.digest(),
    )
    tables = [example_taus(records, chosen), *half_taus(records, chosen)]
    index = tables[0].index
    if index.empty:
        raise UserError(f"sizes={chosen}: no prompt has a cycle at each of them")
    if lost := len(set(example_names(records)) - set(index)):
        log.warning("%d examples left out: without a cycle, or not measured at all sizes", lost)
    rows = _one_row_each(folders, frames, index)
    lengths = rows["n_prompt_tokens"].astype(int).to_numpy()
    seconds = _cycle_seconds(chosen, lengths, curve, trained if cut else None)
    taus = [torch.from_numpy(table.reindex(index).to_numpy().copy()) for table in tables]
    prefills = [RunFolder(Path(row["folder"])).prefill(row) for _, row in rows.iterrows()]  # type: ignore[arg-type]
    return Examples(
        origin,
        example=index.tolist(),
        prompt_id=rows["prompt_id"].tolist(),
        prompt_set=rows["prompt_set"].tolist(),
        split=rows["split"].tolist(),
        logits=torch.stack([prefill.logits for prefill in prefills]),
        hidden=torch.stack([prefill.hidden for prefill in prefills]),
        n_prompt_tokens=torch.tensor(lengths),
        gains=taus[0] / seconds,
        seconds=seconds,
        first_half=taus[1] / seconds,
        second_half=taus[2] / seconds,
    )


def leaks(folders: Sequence[Path], records: pd.DataFrame) -> set[str]:
    """Prompts of runs whose near-duplicates another run put into a later split, test the last.

    Runs draw splits from the prompts that each of them loads, so only here can all be compared.
    """
    prompts = {prompt.id: prompt for folder in folders for prompt in RunFolder(folder).prompts()}
    splits = records.groupby("prompt_id")["split"].first()
    ids = [prompt_id for prompt_id in splits.index if prompt_id in prompts]
    groups = near_duplicate_groups(["\n".join(prompts[each].turns) for each in ids])
    ranks = [SPLITS.index(splits[each]) for each in ids]
    last: dict[int, int] = {}
    for group, rank in zip(groups, ranks, strict=True):
        last[group] = max(rank, last.get(group, rank))
    found = {each for each, g, rank in zip(ids, groups, ranks, strict=True) if rank < last[g]}
    if found:
        log.info("%d prompts left out: another run has their like in a later split", len(found))
    return found


def _one_row_each(
    folders: Sequence[Path], frames: Sequence[pd.DataFrame], index: pd.Index
) -> pd.DataFrame:
    """A plain row per example with the folder that its prefill lies in."""
    tagged = [f.assign(folder=str(d)) for d, f in zip(folders, frames, strict=True)]
    rows = pd.concat(tagged, ignore_index=True)
    rows = rows[(rows["method"] == PLAIN) & (rows["status"] == "ok")]
    rows = rows.assign(example=example_names(rows)).drop_duplicates("example")
    return rows.set_index("example").loc[index]


def _cycle_seconds(
    sizes: Sequence[int],
    lengths: np.ndarray,
    cost: CostCurve | None,
    drafted: int | None,
) -> Tensor:
    """What a cycle costs [P, m], taken at the prompt's length; ones without a curve.

    The drafter's reading of the prompt, once per answer and not per cycle, is left out.
    `drafted` is the block that every size is cut from, None where each drafts its own.
    """
    if cost is None:
        return torch.ones(len(lengths), len(sizes), dtype=torch.float64)

    def of(size: int, length: int) -> float:
        if drafted is None or size == 1:
            return cost.seconds(size, length)
        return cost.cut_seconds(drafted, size, length)

    seconds = [[of(size, int(length)) for size in sizes] for length in lengths]
    return torch.tensor(seconds, dtype=torch.float64)


def save_examples(examples: Examples, folder: Path) -> None:
    """Write a `datasets.Dataset` and origin.json; what stood there is replaced when both are done.

    16-bit logits keep all their digits as float16; others are stored as float32.
    """
    make_folder(folder)
    narrow = examples.logits.dtype in (torch.bfloat16, torch.float16)
    kind = Value("float16" if narrow else "float32")
    dtype = torch.float16 if narrow else torch.float32
    columns: dict[str, Any] = {name: getattr(examples, name) for name in _STRINGS}
    schema: dict[str, Any] = dict.fromkeys(columns, Value("string"))
    for name in ("logits", "hidden"):
        columns[name] = list(getattr(examples, name).to(dtype).numpy())
        schema[name] = List(kind)
    columns["n_prompt_tokens"], schema["n_prompt_tokens"] = (
        examples.n_prompt_tokens.tolist(),
        Value("int32"),
    )
    for name in _MATRICES:
        columns[name], schema[name] = getattr(examples, name).tolist(), List(Value("float64"))
    scratch = folder / "examples.tmp"
    Dataset.from_dict(columns, features=Features(schema)).save_to_disk(scratch)
    shutil.rmtree(folder / "examples", ignore_errors=True)
    scratch.rename(folder / "examples")
    text = json.dumps(asdict(examples.origin), indent=1).encode()
    replace_file(folder / "origin.json", lambda stream: stream.write(text))


def load_examples(folder: Path) -> Examples:
    """What `save_examples` wrote. Raises UserError when the folder holds none."""
    place = folder / "origin.json"
    try:
        origin = fitted(Origin, json.loads(place.read_text(encoding="utf-8")))
        place = folder / "examples"
        table = load_from_disk(place).with_format("torch")
        values: dict[str, Any] = {name: list(table[name]) for name in _STRINGS}
        columns = table[:]
        values |= {name: torch.as_tensor(columns[name]) for name in _TENSORS}
        for name in _MATRICES:
            if values[name].shape != (len(table), len(origin.sizes)):
                raise ValueError(f"{name} of another shape than origin.json says")
    except Exception as error:  # readers of three formats raise a dozen unrelated kinds
        raise UserError(
            f"dataset={folder}: no examples in {place.name} ({first_line(error)}); make them with "
            "python -m blockpilot.dataset"
        ) from error
    return Examples(origin, **values)
