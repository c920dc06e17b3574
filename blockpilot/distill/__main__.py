"""Stage `distill`: train a drafter for any target from the target's own responses.

    python -m blockpilot.distill experiment=local_drafter prompts.sets.gsm8k-train.path=<file>
    python -m blockpilot.distill drafter=eagle3 ...
    torchrun --nproc-per-node 2 -m blockpilot.distill ...

Answers, checkpoint and the finished drafter lie in <paths.outputs>/distill/<run id>/; the same
command again continues where it was interrupted.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from blockpilot.app.config import DistillConfig
from blockpilot.app.job import stage
from blockpilot.app.target import load_target, model_shape
from blockpilot.app.terminal import show_estimate
from blockpilot.app.tracking import tracked
from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.launch import WAIT, world
from blockpilot.base.provenance import facts
from blockpilot.decoding.loop import check_prompt
from blockpilot.decoding.target import Target
from blockpilot.distill.blocks import unused_id
from blockpilot.distill.corpus import Corpus
from blockpilot.distill.dflash import DFlashStudent
from blockpilot.distill.eagle3 import Eagle3Student
from blockpilot.distill.held_out import held_out_taus
from blockpilot.distill.model_card import model_card
from blockpilot.distill.responses import (
    Request,
    ResponseSettings,
    batches,
    open_folder,
    requests,
    self_written,
    shard_file,
    write_responses,
)
from blockpilot.distill.student import Student
from blockpilot.distill.trainer import DrafterTrainer
from blockpilot.drafters.dflash import check_fits, load_network, new_config
from blockpilot.drafters.dflash_net import DFlashConfig, DFlashNetwork
from blockpilot.drafters.eagle3 import load_head, new_head
from blockpilot.drafters.eagle3_net import Eagle3Network, default_layers
from blockpilot.prompts.base import DISTILL, SPLITS, VALIDATION, Prompt, PromptSet
from blockpilot.prompts.load import load_prompts
from blockpilot.prompts.local import LocalSet
from blockpilot.records.settings import keep_settings

log = logging.getLogger("blockpilot.distill")  # __name__ is __main__ under python -m

KINDS = ("dflash", "eagle3")

_FINAL_NORM = 0.2
"""First weight of a new network's final norm: at 1 the fresh states meet the target's LM head at a
scale where the loss begins at several times ln V (39 against 14 on SmolLM2) and much of a short run
is spent on shrinking it."""


def run(cfg: DistillConfig) -> Path:
    """Answer the prompts, train the drafter, measure it; the folder of the finished drafter.

    With `plan` nothing is loaded or made.
    """
    folder = Path(cfg.paths.outputs) / "distill" / cfg.run_id
    name = name_of(cfg)
    if cfg.plan:
        show_estimate(distill_plan(cfg))
        return folder / name
    make_folder(folder)
    target = load_target(cfg)
    if target.dtype == torch.float64:
        raise UserError("dtype=float64: training computes in bfloat16 or float32; use one of them")
    processes = PartialState(cpu=target.device.type == "cpu", timeout=WAIT)
    # Left alone, a rank that ends while another's threads still talk to it can abort that one.
    atexit.register(processes.destroy_process_group)
    made_for = {
        "target": cfg.model.name,
        "seed": cfg.seed,
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_fingerprint": target.fingerprint,
    }
    keep_settings(folder / "target.json", made_for, what="responses")
    start = continued(cfg, target)
    layers = layers_read(cfg, target, start)
    prompts = _prompts(cfg, target, folder, processes)
    learnt = _answer(cfg, target, prompts, DISTILL, folder, layers)
    held_out = _answer(cfg, target, prompts, VALIDATION, folder, layers)
    processes.wait_for_everyone()
    corpus, validation = Corpus(learnt), Corpus(held_out)
    log.info("%d responses, %d tokens", len(corpus), corpus.response_tokens)
    student = new_student(cfg, target, corpus, start)
    made_by = {
        **facts(target.device),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "processes": processes.num_processes,
    }
    trainer = DrafterTrainer(
        student, target.device, corpus, cfg.training, seed=cfg.seed, folder=folder, made_by=made_by
    )
    trainer.resume()
    tracker = instantiate(cfg.tracker, _convert_="all")
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    with tracked(tracker, folder, config=settings, rank=processes.process_index):
        trainer.run(validation, tracker)
        finished = folder / name
        if processes.is_main_process:
            student.save(finished)
        processes.wait_for_everyone()
        taus = held_out_taus(
            target,
            student.method(finished),
            {k: _chosen(cfg, target, v) for k, v in _by_set(prompts, VALIDATION).items()},
            temperature=cfg.decoding.temperature,
            seed=cfg.seed,
            max_new_tokens=cfg.decoding.max_new_tokens,
        )
        if processes.is_main_process:
            tracker.summarise({f"macro_tau/{name}": tau for name, tau in taus.items()})
            card = model_card(
                name, kind_of(cfg), cfg, corpus, taus, trainer.seconds, trainer.made_by
            )
            replace_file(finished / "README.md", lambda stream: stream.write(card.encode()))
            log.info("drafter in %s, held-out macro tau %s", finished, taus)
    processes.wait_for_everyone()
    return finished


def distill_plan(cfg: DistillConfig) -> dict[str, float | str]:
    """What a distillation will take, by name; every answer is taken to use up its budget."""
    sets: dict[str, PromptSet] = instantiate(cfg.prompts.sets, _convert_="all")
    prompts = load_prompts(
        sets, limit=cfg.prompts.limit, path=cfg.prompts.path, split=None, folder=cfg.prompts.folder
    )
    learnt = sum(each.count for each in cfg.responses.self_written.values())
    for name, group in _by_set(prompts, DISTILL).items():
        limit = cfg.responses.limit_of.get(name, cfg.responses.limit)
        learnt += len(group[:limit])
    measured = sum(
        len(group[: cfg.responses.validation]) for group in _by_set(prompts, VALIDATION).values()
    )
    tokens = (learnt + measured) * cfg.decoding.max_new_tokens
    training, width = cfg.training, model_shape(cfg.model).hidden_size
    blocks = training.steps * training.sequences_per_step * training.anchors_per_sequence
    plan: dict[str, float | str] = {
        "answers to learn from, at most": learnt,
        "answers to measure on": measured,
        "response tokens, at most": tokens,
        "optimizer steps": training.steps,
        "blocks per process, at most": blocks,
    }
    if cfg.responses.store_features:
        layers = cfg.new_drafter.n_target_layers if kind_of(cfg) == "dflash" else 3
        stored = tokens * width * (layers + 1) * 2
        plan["GB of response features and states in 16 bits, at most"] = round(stored / 1e9, 2)
    return plan


def name_of(cfg: DistillConfig) -> str:
    """Of the new drafter, and of its folder in the run's."""
    new = cfg.new_drafter
    return new.name or f"{cfg.model.name}-{kind_of(cfg)}-b{new.block_size}"


def kind_of(cfg: DistillConfig) -> str:
    """The kind of drafter to train. Raises UserError for one that nothing is learnt by."""
    kind = str(get_class(cfg.drafter["_target_"]).name)
    if kind not in KINDS:
        raise UserError(f"drafter={kind}: nothing to train; allowed are {', '.join(KINDS)}")
    return kind


def layers_read(
    cfg: DistillConfig, target: Target, start: DFlashNetwork | Eagle3Network | None
) -> tuple[int, ...]:
    """Target layers that the drafter reads (UserError when a new one cannot fit the target)."""
    if start is not None:
        return start.config.target_layer_ids
    if kind_of(cfg) == "dflash":
        return drafter_config(cfg, target).target_layer_ids
    return default_layers(target.config.num_hidden_layers, name_of(cfg))


def continued(cfg: DistillConfig, target: Target) -> DFlashNetwork | Eagle3Network | None:
    """The drafter that training continues from, None for a new one.

    Raises UserError when it is missing, of another target or not what `new_drafter` asks for.
    """
    init, new = cfg.training.init, cfg.new_drafter
    if init is None:
        return None
    if kind_of(cfg) == "eagle3":
        head = load_head(init, target)
        if head.config.embeds:
            raise UserError(
                f"training.init={init}: the head has an embedding of its own, which is not "
                "trained; allowed are heads that use the target's"
            )
        if head.config.draft_vocab_size > new.draft_vocabulary:
            raise UserError(
                f"training.init={init}: it can say {head.config.draft_vocab_size} tokens, "
                f"new_drafter.draft_vocabulary={new.draft_vocabulary} asks for fewer"
            )
        return head
    network = load_network(init, target)
    theirs, wanted = network.config.published(), drafter_config(cfg, target).published()
    for key, value in wanted.items():
        if theirs[key] != value:
            raise UserError(
                f"training.init={init}: {key}={theirs[key]}, new_drafter asks for {value}"
            )
    return network


def new_student(
    cfg: DistillConfig,
    target: Target,
    corpus: Corpus,
    start: DFlashNetwork | Eagle3Network | None,
) -> Student:
    """The drafter before its first step: random, or the one that training continues from."""
    if kind_of(cfg) == "dflash":
        if start is None:
            start = DFlashNetwork(drafter_config(cfg, target))
            torch.nn.init.constant_(start.norm.weight, _FINAL_NORM)
        assert isinstance(start, DFlashNetwork)
        return DFlashStudent(start.to(target.device), target, corpus, cfg.training)
    if start is None:
        ids = corpus.frequent_tokens(cfg.new_drafter.draft_vocabulary, target.embed_rows)
        start = new_head(target, ids)
        rows = target.head_rows[ids.to(target.device)]
        start.lm_head.weight.data.copy_(rows)
        torch.nn.init.constant_(start.norm.weight, _FINAL_NORM)
    assert isinstance(start, Eagle3Network)
    size = cfg.new_drafter.block_size
    return Eagle3Student(start.to(target.device), target, cfg.training, size)


def drafter_config(cfg: DistillConfig, target: Target) -> DFlashConfig:
    """Shape of a new DFlash drafter; the mask defaults to the first row that no token has."""
    mask = cfg.new_drafter.mask_token_id
    if mask is None:
        mask = unused_id(target)
    config = new_config(
        target,
        n_layers=cfg.new_drafter.n_layers,
        n_target_layers=cfg.new_drafter.n_target_layers,
        block_size=cfg.new_drafter.block_size,
        mask_token_id=mask,
    )
    check_fits(config, target, name_of(cfg))
    return config


def _prompts(
    cfg: DistillConfig, target: Target, folder: Path, processes: PartialState
) -> list[Prompt]:
    if cfg.prompts.split is not None:
        raise UserError(
            f"prompts.split={cfg.prompts.split}: distill learns from the distill split and "
            "measures on validation; leave it null"
        )
    if cfg.decoding.top_k or cfg.decoding.top_p < 1:
        raise UserError(
            f"decoding.top_k={cfg.decoding.top_k}, decoding.top_p={cfg.decoding.top_p}: responses "
            "are the target's unfiltered ones; set them to 0 and 1"
        )
    sets: dict[str, PromptSet] = instantiate(cfg.prompts.sets, _convert_="all")
    for name in cfg.responses.self_written:
        file = folder / f"{name}.jsonl"
        processes.wait_for_everyone()  # so that all see the same file, or none
        if not file.exists():
            _write_prompts(cfg, target, name, file, processes)
        processes.wait_for_everyone()
        sets[name] = LocalSet(name=name, held_out=False, path=file)
    prompts = load_prompts(
        sets, limit=cfg.prompts.limit, path=cfg.prompts.path, split=None, folder=cfg.prompts.folder
    )
    sizes = Counter(prompt.split for prompt in prompts)
    for split in (DISTILL, VALIDATION):
        if not sizes[split]:
            there = ", ".join(f"{name} {sizes[name]}" for name in SPLITS)
            raise UserError(
                f"no prompt falls into split {split} (there are: {there}); give more prompts, or "
                "sets that are not held out for test"
            )
    return prompts


def _write_prompts(
    cfg: DistillConfig, target: Target, name: str, file: Path, processes: PartialState
) -> None:
    """Let the target write the prompts of one set, in whole batches, over all ranks."""
    size, wanted = cfg.responses.batch_size, cfg.responses.self_written[name]
    every = range(math.ceil(wanted.count / size))
    mine = every[processes.process_index :: processes.num_processes]
    written = self_written(
        target, name, wanted.opening, mine, size, cfg.decoding.max_new_tokens, cfg.seed
    )
    parts = dict(gather_object(list(zip(mine, written, strict=True))))
    if processes.is_main_process:
        texts = dict.fromkeys(text for number in every for text in parts[number])
        lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
        replace_file(file, lambda stream: stream.write(lines.encode()))


def _chosen(cfg: DistillConfig, target: Target, prompts: Sequence[Prompt]) -> list[Request]:
    """Prompts of one set and split, ready, up to the limit of the split."""
    if prompts[0].split == VALIDATION:
        limit: int | None = cfg.responses.validation
    else:
        limit = cfg.responses.limit_of.get(prompts[0].set, cfg.responses.limit)
    ready = requests(target, prompts, cfg.model, limit)
    budget, widest = cfg.decoding.max_new_tokens, cfg.new_drafter.block_size
    fit = [each for each in ready if check_prompt(target, each.ids, budget, widest) is None]
    if lost := len(ready) - len(fit):
        log.warning("%s: %d prompts left out, too long for the target", prompts[0].set, lost)
    return fit


def _by_set(prompts: Sequence[Prompt], split: str) -> dict[str, list[Prompt]]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.split == split:
            groups.setdefault(prompt.set, []).append(prompt)
    return groups


def _answer(
    cfg: DistillConfig,
    target: Target,
    prompts: Sequence[Prompt],
    split: str,
    folder: Path,
    layers: tuple[int, ...],
) -> list[Path]:
    """Shards of the target's responses to one split; every prompt set has its folder."""
    settings = ResponseSettings(
        target=cfg.model.name,
        target_fingerprint=target.fingerprint,
        tokenizer=target.tokenizer_fingerprint,
        revision=cfg.model.revision,
        dtype=str(target.dtype).removeprefix("torch."),
        thinking=cfg.model.thinking,
        template_date=cfg.model.template_date,
        temperature=cfg.decoding.temperature,
        seed=cfg.seed,
        max_new_tokens=cfg.decoding.max_new_tokens,
        feature_layers=layers if cfg.responses.store_features else (),
        batch_size=cfg.responses.batch_size,
    )
    place = world()
    shards: list[Path] = []
    for name, group in _by_set(prompts, split).items():
        answers = folder / "responses" / split / name
        open_folder(answers, settings)
        work = batches(_chosen(cfg, target, group), settings.batch_size)
        # In turn over all sets: of many small ones, the first rank would have every batch.
        for index in range((place.rank - len(shards)) % place.size, len(work), place.size):
            begin = time.monotonic()
            tokens = write_responses(target, work[index], answers, index, settings)
            if tokens:
                pace = tokens / (time.monotonic() - begin)
                log.info("%s %s: batch %d/%d, %.0f/s", split, name, index + 1, len(work), pace)
        shards += [shard_file(answers, index) for index in range(len(work))]
    return shards


def shareable(cfg: DistillConfig) -> bool:
    """Whether a pipeline may give it several processes: nothing in it is timed."""
    return True


@stage("distill", DistillConfig)
def main(cfg: DistillConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
