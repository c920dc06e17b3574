"""From records to a policy: examples, the predictor's training, and the policy in the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from decoding_kit import PROMPT, plain, sampler
from records_kit import make_trace
from stages_kit import composed, performed, sweep_arguments, texts_of, write_prompts
from test_metrics import frame, row

from blockpilot import dataset, train
from blockpilot.app.target import load_target
from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method, decode
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.policies.blockpilot import BlockSizePolicy
from blockpilot.predictor.examples import Examples, Origin, gather, leaks, load_examples
from blockpilot.predictor.net import (
    FEATURES,
    load_predictor,
)
from blockpilot.predictor.trainer import PredictorTrainer, data_of, regret
from blockpilot.prompts.base import Prompt
from blockpilot.records.run_folder import RunFolder
from blockpilot.stats.tau import example_names, example_taus, half_taus
from blockpilot.sweep import __main__ as sweep

SMALL = ["predictor.hidden=16", "epochs=10", "learning_rate=1e-2", "tracker=none", "device=cpu"]


def arguments(folder: Path, *more: str) -> list[str]:
    """A tiny replayed sweep over prompts of three splits."""
    texts = [text for split in ("policy", "validation", "test") for text in texts_of(split, 4)]
    file = write_prompts(folder / "prompts.jsonl", [*texts, *texts_of("distill", 2)])
    return sweep_arguments(folder, file, "mode=replay", "decoding.max_new_tokens=8", *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a sweep, its dataset and a trained predictor lie."""
    place = tmp_path_factory.mktemp("learning")
    performed(sweep.run, "sweep", *arguments(place))
    performed(dataset.run, "dataset", f"runs=[{place}/sweep/run]", *outputs(place))
    performed(train.run, "train", f"dataset={place}/dataset/run", *SMALL, *outputs(place))
    return place


def outputs(place: Path, run_id: str = "run") -> list[str]:
    return [f"paths.outputs={place}", f"run_id={run_id}"]


def test_examples_are_the_rows_and_prefills_of_the_sweep(folder: Path) -> None:
    examples = load_examples(folder / "dataset/run")
    assert examples.split.count("policy") == examples.split.count("test") == 4
    assert "distill" not in examples.split, "the drafter may have learnt from these"
    assert examples.origin.sizes == (15, 16, 17)
    records = pd.read_parquet(folder / "sweep/run/records.parquet")
    for index, prompt in enumerate(examples.prompt_id):
        mine = records[records["prompt_id"] == prompt].set_index("block_size")
        for place, size in enumerate(examples.origin.sizes):
            counts = mine.loc[size, "committed"]
            assert examples.gains[index, place] == np.sum(counts) / len(counts)
        prefill = RunFolder(folder / "sweep/run").prefill(mine.loc[1])
        torch.testing.assert_close(examples.logits[index], prefill.logits.float())
        torch.testing.assert_close(examples.hidden[index], prefill.hidden.float())
        assert examples.n_prompt_tokens[index] == mine.loc[1, "n_prompt_tokens"]


def test_no_prompt_is_in_two_splits(folder: Path) -> None:
    examples = load_examples(folder / "dataset/run")
    assert len(set(examples.prompt_id)) == len(examples)
    parts = [set(examples.of(name).prompt_id) for name in ("policy", "validation", "test")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(examples)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("sizes=[14,16]", r"sizes=\[14, 16\]: the runs measured \[1, 15, 16, 17\], not \[14\]"),
        ("objective=throughput", "objective=throughput: give cost="),
        ("runs=[]", r"runs=\[\]: give the folders of sweeps"),
        ("runs=[/nowhere]", "/nowhere holds no records"),
        ("label=best", "label=best: must be argmax, soft, curve"),
    ],
)
def test_mistakes_of_a_dataset_are_one_line(folder: Path, change: str, told: str) -> None:
    given = [f"runs=[{folder}/sweep/run]", *outputs(folder, "other"), change]
    with pytest.raises(UserError, match=told) as caught:
        performed(dataset.run, "dataset", *given)
    assert "\n" not in str(caught.value)


def test_runs_of_different_pairs_or_with_a_prompt_in_two_splits_are_refused(folder: Path) -> None:
    records = pd.read_parquet(folder / "sweep/run/records.parquet")
    place = folder / "sweep/run"
    rest: dict[str, Any] = {
        "sizes": None,
        "radius": None,
        "label": "argmax",
        "objective": "tau",
        "sharpness": 0.1,
        "cost": None,
    }
    with pytest.raises(UserError, match="runs differ in target"):
        gather([place, place], [records, records.assign(target="other")], **rest)
    with pytest.raises(UserError, match=r"runs differ in temperature \(0.25, "):
        gather([place, place], [records, records.assign(temperature=0.25)], **rest)
    moved = records.assign(split=["test", *["policy"] * (len(records) - 1)])
    with pytest.raises(UserError, match=r"lies in several splits \(policy, test\)"):
        gather([place], [moved], **rest)


def test_near_duplicates_across_runs_stay_on_one_side(tmp_path: Path) -> None:
    """Two runs never compared their prompts; the one in the later split stays."""
    words = "one two three four five six seven eight nine ten eleven twelve"
    texts = {"a/0": words, "a/1": "another text", "b/0": words + " thirteen", "b/1": "a third text"}
    for run in ("a", "b"):
        mine = [Prompt(k, run, (v,), "") for k, v in texts.items() if k.startswith(run)]
        (tmp_path / run).mkdir()
        RunFolder(tmp_path / run).keep_prompts(mine)
        assert RunFolder(tmp_path / run).prompts() == mine
    rows = [("a/0", "policy"), ("a/1", "policy"), ("b/0", "test"), ("b/1", "validation")]
    records = pd.DataFrame(rows, columns=["prompt_id", "split"])
    assert leaks([tmp_path / "a", tmp_path / "b"], records) == {"a/0"}
    with pytest.raises(UserError, match=r"holds no prompts.jsonl"):
        RunFolder(tmp_path).prompts()


def test_candidates_by_radius(folder: Path) -> None:
    given = [f"runs=[{folder}/sweep/run]", *outputs(folder, "radius")]
    found = performed(dataset.run, "dataset", *given, "radius=0")
    assert found.origin.sizes == (16,)
    with pytest.raises(UserError, match=r"sizes=\[16\] and radius=0 are both given"):
        performed(dataset.run, "dataset", *given, "radius=0", "sizes=[16]")
    with pytest.raises(UserError, match=r"the runs measured \[1, 15, 16, 17\], not \[14, 18\]"):
        performed(dataset.run, "dataset", *given, "radius=2")


def test_rows_of_other_policies_are_no_measurement_of_a_size(folder: Path) -> None:
    records = pd.read_parquet(folder / "sweep/run/records.parquet")
    place = folder / "sweep/run"
    other = records[records["block_size"] == 17].assign(policy="tree", method="tree15")
    other["committed"] = [np.array([1] * 7)] * len(other)
    rest: dict[str, Any] = {"sizes": None, "radius": None, "label": "argmax", "objective": "tau"}
    found = [
        gather([place], [rows], **rest, sharpness=0.1, cost=None).gains
        for rows in (records, pd.concat([records, other]))
    ]
    assert torch.equal(*found)


def test_taus_are_means_over_seeds_and_halves_split_the_answer() -> None:
    records = frame(
        [
            row("p", 8, make_trace([4, 2]), seed=0),
            row("p", 8, make_trace([1, 1]), seed=1),
            row("p", 4, make_trace([2, 2, 1, 1]), seed=0),
            row("q", 8, make_trace([3]), seed=0),
        ]
    )
    taus = example_taus(records, [8])
    assert taus[8].to_dict() == {"set/p": (3 + 1) / 2, "set/q": 3}
    taus = example_taus(records, [4, 8])
    assert taus.to_dict("index") == {"set/p": {4: 1.5, 8: 3}}, "q, and p's other seed, lack a size"
    first, second = half_taus(records, [4, 8])
    assert first.to_dict("index") == {"set/p": {4: 2, 8: 4}}
    assert second.to_dict("index") == {"set/p": {4: 1, 8: 2}}
    assert len(half_taus(records, [8])[0]) == 1, "one cycle is no two halves"


def test_a_later_turn_behind_sampled_answers_is_an_example_of_its_seed() -> None:
    records = frame([row("p", 8, make_trace([2]), seed=s, turn=t) for s in (0, 1) for t in (0, 1)])
    greedy = records.assign(temperature=0.0)
    assert set(example_names(greedy)) == {"set/p", "set/p#1"}
    assert set(example_names(records.assign(temperature=1.0))) == {
        "set/p",
        "set/p#1@0",
        "set/p#1@1",
    }


def test_an_answer_of_one_cycle_is_an_example_without_halves(folder: Path) -> None:
    records = pd.read_parquet(folder / "sweep/run/records.parquet")
    short = records["prompt_id"] == records["prompt_id"][records["split"] == "test"].iloc[0]
    records.loc[short, "committed"] = pd.Series([np.array([3])] * len(records))[short]
    rest: dict[str, Any] = {"sizes": None, "radius": None, "label": "argmax", "objective": "tau"}
    found = gather([folder / "sweep/run"], [records], **rest, sharpness=0.1, cost=None)
    place = found.prompt_id.index(records["prompt_id"][short].iloc[0])
    assert (found.gains[place] == 3).all()
    assert torch.stack([found.first_half[place], found.second_half[place]]).isnan().all()
    assert not found.gains.isnan().any()


def test_a_predictor_is_not_continued_on_other_examples(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    given = [f"runs=[{folder}/sweep/run]", *outputs(tmp_path)]
    learn = [f"dataset={tmp_path}/dataset/run", *SMALL, "epochs=1", *outputs(tmp_path)]
    performed(dataset.run, "dataset", *given)
    performed(train.run, "train", *learn)
    performed(dataset.run, "dataset", *given)
    performed(train.run, "train", *learn)
    assert "training from the start" not in caplog.text, "the same examples, made again"
    performed(dataset.run, "dataset", *given, "sizes=[15,17]")
    place = performed(train.run, "train", *learn)
    assert "training from the start" in caplog.text
    assert load_predictor(place).config.sizes == (15, 17)


@pytest.mark.parametrize("label", ["argmax", "soft", "curve"])
@pytest.mark.parametrize("kind", FEATURES)
def test_every_input_and_label_trains_and_decodes_plain_decodings_text(
    folder: Path, tmp_path: Path, kind: str, label: str
) -> None:
    given = [f"runs=[{folder}/sweep/run]", f"label={label}", *outputs(tmp_path)]
    performed(dataset.run, "dataset", *given)
    options = [*SMALL, "epochs=2", f"predictor.features={kind}"]
    place = performed(
        train.run, "train", f"dataset={tmp_path}/dataset/run", *options, *outputs(tmp_path)
    )
    target = load_target(composed("sweep", *arguments(tmp_path)))
    wanted = plain(target, 8, sampler(1.0)).tokens
    method = Method(
        DFlashDrafter(checkpoint="random", ignore_keys=[], head=None),
        BlockSizePolicy(path=str(place)),
    )
    method.bind(target)
    trace = decode(target, method, PROMPT, sampler(1.0), 8)
    assert trace.tokens == wanted
    assert trace.policy_s > 0
    assert set(trace.verified) <= {15, 16, 17}


SETTINGS = {"target_fingerprint": "abc", "dtype": "float32"}


def separable(n: int, seed: int) -> Any:
    """Examples whose best size shows in one logit."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 12, generator=generator)
    gains = torch.stack([logits[:, 3], torch.zeros(n), -logits[:, 3]], dim=1).double() + 3
    origin = Origin((6, 8, 10), "t", 1000, "d", "draft", "argmax", "tau", 0.1, (), SETTINGS, None)
    names = [str(index) for index in range(n)]
    return Examples(
        origin,
        names,
        names,
        names,
        ["policy"] * n,
        logits,
        torch.randn(n, 4, generator=generator),
        torch.full((n,), 9),
        gains,
        torch.ones_like(gains),
        gains,
        gains,
    )


def test_what_can_be_learnt_is_learnt_and_shuffled_labels_are_not(tmp_path: Path) -> None:
    cfg = composed(
        "train", "dataset=x", *SMALL, "epochs=30", "predictor.dropout=0", *outputs(tmp_path)
    )
    found = {}
    for name in ("real", "shuffled"):
        learnt, held_out = separable(200, 0), separable(200, 1)
        if name == "shuffled":
            learnt = train.shuffled(learnt, 0)
        device = torch.device("cpu")
        net = train.untrained(cfg, learnt)
        trainer = PredictorTrainer(net, train.optimisation(cfg), tmp_path / name, device)
        (tmp_path / name).mkdir()
        parts = [data_of(part, "logits", 0.1, device) for part in (learnt, held_out)]
        trainer.run(*parts, lambda curves, epoch: None)
        test = data_of(separable(400, 2), "logits", 0.1, device)
        found[name] = regret(trainer.scores(test.features), test.gains)
    fixed = float((test.gains.max(dim=1).values - test.gains[:, 1]).mean())
    assert found["real"] < 0.2 * fixed
    assert found["shuffled"] > 0.6 * fixed


def test_an_interrupted_training_ends_with_the_same_bits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = folder / "train/run/predictor/model.safetensors"
    one_pass, done = PredictorTrainer._pass, []

    def interrupted(trainer: PredictorTrainer, data: Any) -> float:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(trainer.epoch)
        return one_pass(trainer, data)

    given = [f"dataset={folder}/dataset/run", *SMALL, *outputs(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(PredictorTrainer, "_pass", interrupted)
        with pytest.raises(KeyboardInterrupt):
            performed(train.run, "train", *given)
    place = performed(train.run, "train", *given)
    assert (place / "model.safetensors").read_bytes() == whole.read_bytes()
    with pytest.raises(UserError, match=r"a predictor in .* made with learning_rate=0.01, this"):
        performed(train.run, "train", *given, "learning_rate=1e-3")


def test_training_stops_when_enough_epochs_were_in_vain(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter([0.5, 0.2, 0.3, 0.2, 0.4])  # a regret that is only as small is none smaller
    passes, one_pass = [], PredictorTrainer._pass
    monkeypatch.setattr("blockpilot.predictor.trainer.regret", lambda *_: next(told))
    monkeypatch.setattr(
        PredictorTrainer, "_pass", lambda *given: passes.append(0) or one_pass(*given)
    )
    given = [f"dataset={folder}/dataset/run", *SMALL, "patience=3", *outputs(tmp_path)]
    place = performed(train.run, "train", *given)
    weights = (place / "model.safetensors").read_bytes()
    assert (len(passes), next(told, "all asked for")) == (5, "all asked for")
    assert performed(train.run, "train", *given) == place
    assert len(passes) == 5, "a training that stopped is not taken up again"
    assert (place / "model.safetensors").read_bytes() == weights


def test_a_saved_policy_is_the_same_policy(folder: Path, tmp_path: Path) -> None:
    policy = BlockSizePolicy.from_pretrained(str(folder / "train/run/predictor"))
    policy.save_pretrained(tmp_path / "copy")
    again = BlockSizePolicy.from_pretrained(str(tmp_path / "copy"))
    examples = load_examples(folder / "dataset/run")
    read = examples.logits, examples.hidden, examples.n_prompt_tokens
    assert torch.equal(policy.scores(*read), again.scores(*read))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("target", "other", "trained for target other, this is smollm2-135m"),
        ("drafter", "other", "trained for drafter other, this is random@"),
        ("vocab_size", 299, "trained for vocabulary 299, this is 300"),
        ("hidden_size", 31, "trained for hidden_size 31, this is 32"),
    ],
)
def test_a_policy_of_another_pair_is_refused_by_name(
    folder: Path, tmp_path: Path, key: str, value: object, told: str
) -> None:
    policy = BlockSizePolicy.from_pretrained(str(folder / "train/run/predictor"))
    policy.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    if key in ("vocab_size", "hidden_size"):
        raw["features"] = "summary"  # its input width depends on neither
        policy.net = None
        small = [*SMALL, "epochs=1", "predictor.features=summary", *outputs(tmp_path)]
        place = performed(train.run, "train", f"dataset={folder}/dataset/run", *small)
        (tmp_path / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**raw, key: value}))
    target = load_target(composed("sweep", *arguments(tmp_path)))
    drafter = DFlashDrafter(checkpoint="random", ignore_keys=[], head=None)
    with pytest.raises(UserError, match=told):
        Method(drafter, BlockSizePolicy(path=str(tmp_path))).bind(target)


def test_a_folder_without_a_predictor_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"policy {tmp_path}: no predictor"):
        BlockSizePolicy.from_pretrained(str(tmp_path))
