"""What each part of a decision per cycle adds, on the answers of replayed sweeps.

Every method walks the same answers, and a cost curve says what its cycles take. A pilot is walked
whole and without one part each; in hindsight the answer is known beforehand, and the cheapest way
through it, over all sources and sizes, is a shortest path over its anchors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from blockpilot.base.errors import UserError
from blockpilot.costs.curve import CostCurve
from blockpilot.decoding.anchors import Marginals
from blockpilot.decoding.replay import decided, known_candidates, known_path
from blockpilot.decoding.text import IndexedText
from blockpilot.policies.pilot import LONGEST_COPY, NODES, PilotPolicy
from blockpilot.policies.pilot_fit import Answered, Pair, answers_of
from blockpilot.policies.tree import best_first, tree_draft
from blockpilot.predictor.acceptance import AcceptanceModel, unfitted
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN
from blockpilot.stats.arrays import Ints
from blockpilot.stats.comparison import TokenTimes
from blockpilot.stats.oracles import hindsight_seconds
from blockpilot.sweep.tables import ALL_SETS

log = logging.getLogger(__name__)

_LONGEST_ENDING = 8  # that the text's index knows
_SIZES = (1, 2, 3, 5, 7, 11, NODES)  # nodes of a tree in hindsight
HINDSIGHT = "in hindsight"
_ANSWER = ["prompt_id", "turn", "seed"]

Walk = Callable[[Answered], dict[str, Any]]
"""Seconds of one answer, and where there are cycles, how many of them did what."""


def ladder(
    runs: Sequence[RunFolder],
    curve: CostCurve,
    models: Mapping[str, AcceptanceModel],
    over: Sequence[str],
) -> pd.DataFrame:
    """One line per set and method, pooled ones last: predicted speed, tau, and sources.

    The methods are those of the sweeps, the fastest last, then the pilots `models` by name, the
    first also without one part each, then hindsight. Columns: set, method, prompts, speedup (TPOT
    of plain decoding over the method's, by the curve) and `over_<method>` for each of `over`, all
    with 95% intervals over prompts (_low, _high); tau (macro), drafting (share of cycles), quoted
    and repeated (share of the new tokens that were copied from the prompt and from the answer
    itself). Sets of several turns have lines for the first and for later turns too.

    Raises UserError for runs without replays, with times of another curve, without a method of
    `over`, or with a prompt that a model was fitted to.
    """
    swept = pd.concat([_swept(run) for run in runs], ignore_index=True)
    times = swept.groupby("method")["seconds"].sum().sort_values(ascending=False)
    methods = [PLAIN, *(name for name in times.index if name != PLAIN)]
    if missing := sorted(set(over) - set(methods)):
        allowed = ", ".join(methods)
        raise UserError(f"over: {missing[0]} is no method of the runs; they have {allowed}")
    walked = pd.concat([_walked(run, curve, models) for run in runs], ignore_index=True)
    methods += dict.fromkeys(walked["method"])
    if twice := next((name for name in models if name in times), None):
        raise UserError(f"policies: {twice} is the name of a method of the runs too")
    lines = [
        {"set": name, "method": method, **_line(part, method, over)}
        for name, part in _sets(pd.concat([swept, walked], ignore_index=True))
        for method in methods
    ]
    return pd.DataFrame(lines)


def _walked(
    run: RunFolder, curve: CostCurve, models: Mapping[str, AcceptanceModel]
) -> pd.DataFrame:
    """A row per answer of one run, and per pilot and hindsight."""
    pair, answers = answers_of(run, None)
    if run.predicted_by != curve.digest():
        raise UserError(f"runs: {run.path} was not swept with cost=<the curve given here>")
    for name, model in models.items():
        fitted = set(model.fitted_to.get("prompts", []))
        if not fitted:
            log.warning("%s does not say which prompts it was fitted to: are these unseen?", name)
        if known := next((each for each in answers if each.prompt_hash[:12] in fitted), None):
            raise UserError(
                f"runs: {run.path} has prompt {known.prompt_id}, which {name} was fitted to"
            )
    walks = dict(_walks(pair, curve, models))
    rows = [
        {
            **{column: getattr(each, column) for column in ("prompt_set", *_ANSWER)},
            "method": name,
            "tokens": len(each.known.tokens) - 1,
            **walk(each),
        }
        for each in answers
        for name, walk in walks.items()
    ]
    return pd.DataFrame(rows)


def _swept(run: RunFolder) -> pd.DataFrame:
    """A row per answer of one run, and per method of its own; answers without a cycle are out."""
    records = run.records()
    records = records[(records["status"] == "ok") & (records["n_new_tokens"] > 1)]
    drafting = [sum(n > 0 for n in row) for row in records["drafted"]]
    return records[["prompt_set", *_ANSWER, "method"]].assign(
        tokens=records["n_new_tokens"].astype(int) - 1,
        seconds=records["predicted_decode_s"].astype(float),
        cycles=[len(row) for row in records["committed"]],
        drafting=drafting,
        quoted=[sum(row) for row in records["quoted"]],
        repeated=[sum(row) for row in records["repeated"]],
    )


def _walks(
    pair: Pair, curve: CostCurve, models: Mapping[str, AcceptanceModel]
) -> Iterator[tuple[str, Walk]]:
    for number, (name, model) in enumerate(models.items()):
        yield name, _pilot(pair, curve, model)
        if number == 0:
            yield f"{name}, no copies", _pilot(pair, curve, model, longest_copy=0)
            yield f"{name}, no drafts", _pilot(pair, curve, model, drafts=False)
            yield f"{name}, not fitted", _pilot(pair, curve, unfitted())
    for sources in (("tree",), ("copy",), ("copy", "tree")):
        named = " and ".join({"tree": "draft", "copy": "copy"}[each] for each in sources)
        yield f"{named}, {HINDSIGHT}", hindsight(curve, sources)


def _pilot(
    pair: Pair,
    curve: CostCurve,
    model: AcceptanceModel,
    *,
    longest_copy: int = LONGEST_COPY,
    drafts: bool = True,
) -> Walk:
    policy = PilotPolicy(path=None, cost=None, nodes=NODES, longest_copy=longest_copy)
    policy.ready(pair.trained_block_size if drafts else 1, drafts, model)
    policy.curve = curve

    def walk(answered: Answered) -> dict[str, Any]:
        trace = decided(policy, answered.replay, answered.known)
        seconds = curve.predicted(trace, len(answered.known.prompt_ids), trees=True)
        return {
            "seconds": seconds["predicted_decode_s"],
            "cycles": len(trace.committed),
            "drafting": sum(n > 0 for n in trace.drafted),
            "quoted": sum(trace.quoted),
            "repeated": sum(trace.repeated),
        }

    return walk


def hindsight(curve: CostCurve, sources: Sequence[str]) -> Walk:
    """The least time of an answer when each cycle may copy or draft as much as turns out right."""

    def walk(answered: Answered) -> dict[str, Any]:
        context, n_anchors = len(answered.known.prompt_ids), len(answered.known.tokens) - 1
        seconds, accepted = [curve.seconds(1, context)], [np.zeros(n_anchors, dtype=np.int64)]
        if "copy" in sources:
            copies = _copies(answered)
            for n in range(1, LONGEST_COPY + 1):
                seconds.append(curve.copy_seconds(n + 1, context))
                accepted.append(np.minimum(copies, n))
        if "tree" in sources and answered.replay.marginals is not None:
            seconds += [curve.tree_seconds(n + 1, context) for n in _SIZES]
            accepted += list(_accepted_of_trees(answered, answered.replay.marginals).T)
        least = hindsight_seconds(np.stack(accepted, axis=1), np.array(seconds))
        return {"seconds": least}

    return walk


def _copies(answered: Answered) -> Ints:
    """At every anchor, how many tokens of the latest longest match are the answer's: [A]."""
    tokens, found = answered.known.tokens, []
    text = IndexedText(_LONGEST_ENDING, answered.known.prompt_ids)
    for anchor in range(len(tokens) - 1):
        text.extend([tokens[anchor]])
        match = text.match()
        copy = text.at(match.places[-1], LONGEST_COPY).tokens if match.length else []
        right = [mine == own for mine, own in zip(copy, tokens[anchor + 1 :], strict=False)]
        found.append((*right, False).index(False))
    return np.array(found, dtype=np.int64)


def _accepted_of_trees(answered: Answered, marginals: Marginals) -> Ints:
    """Accepted tokens of the best-first tree of each size at every anchor: [A, sizes]."""
    tokens, device = answered.known.tokens, torch.device("cpu")
    found = []
    for anchor in range(len(tokens) - 1):
        best = known_candidates(marginals, anchor)
        nodes = best_first(best.logprobs, NODES, best.after)
        trees = [tree_draft(nodes[:n], best, device) for n in _SIZES]
        found.append([len(known_path(tree, tokens[anchor + 1 :])) for tree in trees])
    return np.array(found, dtype=np.int64)


def _sets(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for name, part in rows.groupby("prompt_set", sort=False):
        yield str(name), part
        if part["turn"].max() > 0:
            yield f"{name}, first turns", part[part["turn"] == 0]
            yield f"{name}, later turns", part[part["turn"] > 0]
    yield ALL_SETS, rows


def _line(rows: pd.DataFrame, method: str, over: Sequence[str]) -> dict[str, Any]:
    """The figures of one method on the answers of one set."""
    columns = ["seconds", "tokens", "cycles"]
    sums = rows.groupby(["method", "prompt_id"])[columns].sum()
    mine = sums.loc[method]
    line: dict[str, Any] = {"prompts": len(mine)}
    for base, name in ((PLAIN, "speedup"), *((each, f"over_{each}") for each in over)):
        partner = sums.loc[base].reindex(mine.index)
        times = TokenTimes(
            (partner["seconds"] / partner["tokens"]).to_numpy(dtype=np.float64),
            (mine["seconds"] / mine["tokens"]).to_numpy(dtype=np.float64),
        )
        line[name] = times.ratio
        if base != method:
            line[f"{name}_low"], line[f"{name}_high"] = times.interval()
    own = rows[rows["method"] == method]
    line["tau"] = float((mine["tokens"] / mine["cycles"].where(mine["cycles"] > 0)).mean())
    line["drafting"] = own["drafting"].sum(skipna=False) / own["cycles"].sum(skipna=False)
    for source in ("quoted", "repeated"):
        line[source] = own[source].sum(skipna=False) / own["tokens"].sum()
    return line


ABOUT_LADDER = (
    "All methods walk the same answers; their times are what the cost curve says of their cycles, "
    "without what deciding takes. speedup: plain decoding's time per token over the method's, with "
    "95% bootstrap intervals over prompts; so the columns over. drafting: share of the cycles that "
    "asked the drafter. quoted, repeated: share of the new tokens that were copied from the prompt "
    "and from the answer itself. In hindsight: the answer known beforehand, which no policy does."
)


def ladder_cells(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines of `ladder` as text."""
    ratios = [str(each) for each in lines if f"{each}_low" in lines]
    cells = lines[["set", "method", "prompts"]].astype(str)
    for name in ratios:
        cells[name.replace("_", " ", 1)] = [
            _with_interval(*values)
            for values in lines[[name, f"{name}_low", f"{name}_high"]].to_numpy(dtype=float)
        ]
    cells["tau"] = ["-" if pd.isna(tau) else f"{tau:.2f}" for tau in lines["tau"]]
    for name in ("drafting", "quoted", "repeated"):
        cells[name] = ["-" if pd.isna(share) else f"{share:.0%}" for share in lines[name]]
    return cells


def _with_interval(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f}" if math.isnan(low) else f"{middle:.2f} ({low:.2f}-{high:.2f})"
