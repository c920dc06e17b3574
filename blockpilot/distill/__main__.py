"""Stage `distill`: train a drafter for any target from the target's own responses.

    python -m blockpilot.distill experiment=local_drafter prompts.sets.gsm8k-train.path=<file>
    python -m blockpilot.distill drafter=eagle3 ...
    torchrun --nproc-per-node 2 -m blockpilot.distill ...

Answers, checkpoint and the finished drafter lie in <paths.outputs>/distill/<run id>/; the same
command again continues where it was interrupted.
"""

from __future__ import annotations

import atexit
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from hydra.utils import instantiate
from omegaconf import OmegaConf

from blockpilot.app.config import DistillConfig
from blockpilot.app.job import stage
from blockpilot.app.target import load_target
from blockpilot.app.terminal import show_estimate
from blockpilot.app.tracking import tracked
from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.launch import WAIT
from blockpilot.base.provenance import facts
from blockpilot.decoding.target import Target
from blockpilot.distill.corpus import Corpus
from blockpilot.distill.estimate import distill_estimate
from blockpilot.distill.held_out import held_out_taus
from blockpilot.distill.model_card import model_card
from blockpilot.distill.prompts import distillation_prompts, requests
from blockpilot.distill.recipe import Recipe
from blockpilot.distill.responses import ResponseSettings, answer_all
from blockpilot.distill.trainer import DrafterTrainer
from blockpilot.drafters.forms.checkpoints import read_checkpoint, write_checkpoint
from blockpilot.drafters.forms.speculators import exported
from blockpilot.prompts.base import DISTILL, VALIDATION
from blockpilot.records.settings import keep_settings

log = logging.getLogger("blockpilot.distill")  # __name__ is __main__ under python -m


def run(cfg: DistillConfig) -> Path:
    """Answer the prompts, train the drafter, measure it; the folder of the finished drafter.

    With `plan` nothing is loaded or made.
    """
    folder = Path(cfg.paths.outputs) / "distill" / cfg.run_id
    recipe: Recipe = instantiate(cfg.recipe, _convert_="all")
    block_size = cfg.new_drafter.block_size
    name = cfg.new_drafter.name or f"{cfg.model.name}-{recipe.name}-b{block_size}"
    finished = folder / name
    if cfg.export is not None and recipe.name not in ("dflash", "eagle3"):
        raise UserError(f"export={cfg.export}: a {recipe.name} has no such form; allowed is null")
    if cfg.plan:
        show_estimate(distill_estimate(cfg, recipe))
        return finished
    make_folder(folder)
    target = load_target(cfg)
    if target.dtype == torch.float64:
        raise UserError("dtype=float64: training computes in bfloat16 or float32; use one of them")
    processes = PartialState(cpu=target.device.type == "cpu", timeout=WAIT)
    # Left alone, a rank that ends while another's threads still talk to it can abort that one.
    atexit.register(processes.destroy_process_group)
    target_dtype = str(target.dtype).removeprefix("torch.")
    made_for: dict[str, Any] = {
        "target": cfg.model.name,
        "seed": cfg.seed,
        "dtype": target_dtype,
        "target_fingerprint": target.fingerprint,
    }
    keep_settings(folder / "target.json", made_for, what="responses")
    blueprint = recipe.blueprint(target, name, block_size, cfg.training)

    # What is answered.
    prompts = distillation_prompts(cfg, target, folder, processes)
    to_learn = requests(cfg, target, prompts, DISTILL)
    to_measure = requests(cfg, target, prompts, VALIDATION)
    layers = blueprint.feature_layers if cfg.responses.store_features else ()
    settings = ResponseSettings(
        **made_for,
        tokenizer=target.tokenizer_fingerprint,
        revision=cfg.model.revision,
        thinking=cfg.model.thinking,
        template_date=cfg.model.template_date,
        temperature=cfg.decoding.temperature,
        max_new_tokens=cfg.decoding.max_new_tokens,
        feature_layers=layers,
        batch_size=cfg.responses.batch_size,
    )
    answers = folder / "responses"
    learnt = answer_all(target, to_learn, answers / DISTILL, settings)
    held_out = answer_all(target, to_measure, answers / VALIDATION, settings)
    processes.wait_for_everyone()

    # What is learnt from.
    corpus, validation = Corpus(learnt), Corpus(held_out)
    log.info("%d responses, %d tokens", len(corpus), corpus.response_tokens)

    # What is trained.
    student = blueprint.student(corpus)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    trainer = DrafterTrainer(
        student,
        target.device,
        corpus,
        cfg.training,
        seed=cfg.seed,
        folder=folder,
        drafter_settings={
            "block_size": block_size,
            **{f"recipe.{key}": value for key, value in config["recipe"].items()},
        },
        made_by={
            **facts(target.device),
            "target_dtype": target_dtype,
            "processes": processes.num_processes,
        },
    )
    trainer.resume()
    tracker = instantiate(cfg.tracker, _convert_="all")
    with tracked(tracker, folder, config=config, rank=processes.process_index):
        trainer.run(validation, tracker)
        if processes.is_main_process:
            student.save(finished)
            if cfg.export is not None:
                _export(finished, target, cfg.model.repo)
        processes.wait_for_everyone()

        # What is measured.
        taus = held_out_taus(
            target,
            student.method(finished),
            to_measure,
            temperature=cfg.decoding.temperature,
            seed=cfg.seed,
            max_new_tokens=cfg.decoding.max_new_tokens,
        )
        if processes.is_main_process:
            tracker.summarise({f"macro_tau/{prompt_set}": tau for prompt_set, tau in taus.items()})
            card = model_card(name, recipe, cfg, corpus, taus, trainer.seconds, trainer.made_by)
            replace_file(finished / "README.md", lambda stream: stream.write(card.encode()))
            log.info("drafter in %s, held-out macro tau %s", finished, taus)
    processes.wait_for_everyone()
    return finished


def _export(finished: Path, target: Target, repo: str) -> None:
    """Write a finished drafter in speculators' form too, beside its folder."""
    architectures = target.model.config.architectures or [type(target.model).__name__]
    config, weights = exported(*read_checkpoint(str(finished)), repo, architectures)
    beside = finished.with_name(f"{finished.name}-speculators")
    write_checkpoint(config, weights, beside)
    log.info("in speculators' form: %s", beside)


def shareable(cfg: DistillConfig) -> bool:
    """Whether a pipeline may give it several processes: nothing in it is timed."""
    return True


@stage("distill", DistillConfig)
def main(cfg: DistillConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
