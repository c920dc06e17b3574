"""The prompts of a distillation: read from sets, or written by the target itself.

Those of the split `distill` are learnt from, those of `validation` measure the drafter.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from hydra.utils import instantiate

from blockpilot.app.config import DistillConfig, ModelConfig
from blockpilot.base.errors import UserError
from blockpilot.base.files import replace_file
from blockpilot.decoding.answers import cut, generate
from blockpilot.decoding.loop import check_prompt
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.distill.responses import Request
from blockpilot.prompts.base import DISTILL, SPLITS, VALIDATION, Prompt, PromptSet
from blockpilot.prompts.load import load_prompts
from blockpilot.prompts.local import LocalSet
from blockpilot.prompts.render import render

log = logging.getLogger(__name__)


def read_prompts(cfg: DistillConfig, written: dict[str, PromptSet] | None = None) -> list[Prompt]:
    """Prompts of all splits, from the configured sets and those that the target has written."""
    sets: dict[str, PromptSet] = instantiate(cfg.prompts.sets, _convert_="all")
    return load_prompts(
        sets | (written or {}),
        limit=cfg.prompts.limit,
        path=cfg.prompts.path,
        split=None,
        folder=cfg.prompts.folder,
    )


def distillation_prompts(
    cfg: DistillConfig, target: Target, folder: Path, processes: PartialState
) -> list[Prompt]:
    """Prompts to learn from and to measure on; what the target writes itself is kept in `folder`.

    Raises UserError when one of the two splits is empty or the prompts or answers would be others
    than a distillation takes.
    """
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
    written: dict[str, PromptSet] = {}
    for name in cfg.responses.self_written:
        file = folder / f"{name}.jsonl"
        processes.wait_for_everyone()  # so that all see the same file, or none
        if not file.exists():
            _write_prompts(cfg, target, name, file, processes)
        processes.wait_for_everyone()
        written[name] = LocalSet(name=name, held_out=False, path=file)
    prompts = read_prompts(cfg, written)
    sizes = Counter(prompt.split for prompt in prompts)
    for split in (DISTILL, VALIDATION):
        if not sizes[split]:
            counts = ", ".join(f"{name} {sizes[name]}" for name in SPLITS)
            raise UserError(
                f"no prompt falls into split {split} (there are: {counts}); give more prompts, or "
                "sets that are not held out for test"
            )
    return prompts


def chosen(cfg: DistillConfig, prompts: Iterable[Prompt], split: str) -> dict[str, list[Prompt]]:
    """Prompts of one split by the name of their set, in the order of the sets.

    Of each set the first by hash, up to its limit, so that any prefix is a fair sample.
    """
    sets: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.split == split:
            sets.setdefault(prompt.set, []).append(prompt)
    settings = cfg.responses
    limits: dict[str, int | None] = {
        name: settings.validation
        if split == VALIDATION
        else settings.limit_of.get(name, settings.limit)
        for name in sets
    }
    return {
        name: sorted(group, key=lambda prompt: prompt.hash)[: limits[name]]
        for name, group in sets.items()
    }


def requests(
    cfg: DistillConfig, target: Target, prompts: Iterable[Prompt], split: str
) -> dict[str, list[Request]]:
    """First turns of the chosen prompts of one split as the target reads them, by set; without
    those that are too long for it."""
    budget, widest = cfg.decoding.max_new_tokens, cfg.new_drafter.block_size
    sets: dict[str, list[Request]] = {}
    for name, group in chosen(cfg, prompts, split).items():
        rendered = [_request(target, prompt, cfg.model) for prompt in group]
        sets[name] = [
            each for each in rendered if check_prompt(target, each.ids, budget, widest) is None
        ]
        if lost := len(rendered) - len(sets[name]):
            log.warning("%s: %d prompts left out, too long for the target", name, lost)
    return sets


def _request(target: Target, prompt: Prompt, model: ModelConfig) -> Request:
    messages = [{"role": "user", "content": prompt.turns[0]}]
    if prompt.system is not None:
        messages.insert(0, {"role": "system", "content": prompt.system})
    ids = render(target.tokenizer, messages, model.thinking, model.template_date)
    return Request(prompt, ids)


def _write_prompts(
    cfg: DistillConfig, target: Target, name: str, file: Path, processes: PartialState
) -> None:
    """Let the target write the prompts of one set, in whole batches, over all ranks."""
    size, settings = cfg.responses.batch_size, cfg.responses.self_written[name]
    batches = range(math.ceil(settings.count / size))
    mine = batches[processes.process_index :: processes.num_processes]
    written = self_written(
        target, name, settings.opening, mine, size, cfg.decoding.max_new_tokens, cfg.seed
    )
    parts = dict(gather_object(list(zip(mine, written, strict=True))))
    if processes.is_main_process:
        texts = dict.fromkeys(text for number in batches for text in parts[number])
        lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
        replace_file(file, lambda stream: stream.write(lines.encode()))


@torch.inference_mode()
def self_written(
    target: Target,
    name: str,
    opening: str,
    batches_of: range,
    batch_size: int,
    max_new_tokens: int,
    seed: int,
) -> list[list[str]]:
    """User messages that the target writes itself: an open user turn continued at T = 1.

    `opening` is how every message begins, it may be empty; `name` is the prompt set's and enters
    the noise. One list for each batch number in `batches_of`; a message that does not end within
    `max_new_tokens` or says nothing of its own is dropped. Raises UserError for a target without a
    chat template: it has no turns.
    """
    if target.tokenizer.chat_template is None:
        raise UserError("responses.self_written: the target has no chat template; set it to {}")
    marker = "\u241e"
    message = [{"role": "user", "content": marker}]
    text = str(target.tokenizer.apply_chat_template(message, tokenize=False))
    head = text.split(marker)[0] + opening
    ids = target.tokenizer(head, add_special_tokens=False)["input_ids"]
    written = []
    for number in batches_of:
        keys = [f"{name}/{number * batch_size + row}" for row in range(batch_size)]
        sampler = KeyedSampler(temperature=1.0, seed=seed, prompt_hashes=keys)
        padding = torch.zeros(batch_size, dtype=torch.int64, device=target.device)
        rows = torch.tensor([ids] * batch_size)
        mask = torch.ones_like(rows)
        output = generate(target, rows, mask, sampler, padding, max_new_tokens)
        ended = [cut(row, target.stop_ids) for row in output[:, len(ids) :].tolist()]
        texts = [
            str(target.tokenizer.decode(tokens[:-1], skip_special_tokens=True))
            for tokens in ended
            if tokens[-1] in target.stop_ids
        ]
        written.append([(opening + own).strip() for own in texts if own.strip()])
    return written
