"""What decoded and replayed sweeps share: turns of a conversation and the settings of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from blockpilot.app.config import SweepConfig
from blockpilot.app.target import attention_of
from blockpilot.decoding.loop import Method, check_prompt
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.prompts.base import Prompt
from blockpilot.prompts.render import render
from blockpilot.records.prefill import Prefill
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN, Settings, row_key


@dataclass(frozen=True)
class Turn:
    """One decode's input, or the problem that keeps it from running."""

    ids: list[int]
    hash: str  # what the sampler is keyed by
    problem: str | None


class Rows:
    """Turns and settings of the prompts of one sweep; measured by its subclasses.

    `failed` lists prompts that raised.
    """

    mode: str  # of the rows

    def __init__(
        self, cfg: SweepConfig, target: Target, methods: dict[str, Method], run: RunFolder
    ) -> None:
        self.cfg, self.target, self.methods, self.run = cfg, target, methods, run
        self.failed: list[str] = []

    def expected_keys(self, prompt: Prompt) -> set[str]:
        """Keys of the rows that a finished prompt has."""
        return {
            row_key(self.settings(prompt, turn, name))
            for turn in range(len(prompt.turns))
            for name in self.methods
        }

    def settings(self, prompt: Prompt, turn: int, name: str) -> Settings:
        """What defines the row of a prompt, turn and method."""
        cfg, drafter, policy = self.cfg, self.methods[name].drafter, self.methods[name].policy
        assert policy.block_size is not None
        return Settings(
            prompt_id=prompt.id,
            prompt_hash=prompt.hash,
            prompt_set=prompt.set,
            split=prompt.split,
            turn=turn,
            method=name,
            drafter=drafter.name,
            drafter_checkpoint=drafter.fingerprint,
            policy="@".join(filter(None, (policy.name, policy.fingerprint))),
            trained_block_size=drafter.trained_block_size,
            block_size=policy.block_size,
            block_mode=policy.block_mode,
            target=cfg.model.name,
            target_revision=cfg.model.revision,
            target_fingerprint=self.target.fingerprint,
            tokenizer=self.target.tokenizer_fingerprint,
            weights=cfg.weights,
            temperature=cfg.decoding.temperature,
            top_k=cfg.decoding.top_k,
            top_p=cfg.decoding.top_p,
            seed=cfg.seed,
            dtype=str(self.target.dtype).removeprefix("torch."),
            attention=attention_of(cfg),
            engine=self.target.engine,
            device=self.target.device.type,
            thinking=cfg.model.thinking,
            template_date=cfg.model.template_date,
            max_new_tokens=cfg.decoding.max_new_tokens,
            mode=self.mode,
        )

    def turn(self, prompt: Prompt, answers: Sequence[str]) -> Turn:
        """The conversation up to the next user message, rendered."""
        system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        messages = [*system, {"role": "user", "content": prompt.turns[0]}]
        for answer, question in zip(answers, prompt.turns[1:], strict=False):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": question})
        model = self.cfg.model
        ids = render(self.target.tokenizer, messages, model.thinking, model.template_date)
        number = len(answers)
        key = f"{prompt.hash}/{number}" if number else prompt.hash
        widest = max(method.policy.widest for method in self.methods.values())
        budget = self.cfg.decoding.max_new_tokens
        return Turn(ids, key, check_prompt(self.target, ids, budget, widest))

    def sampler(self, hashes: Sequence[str]) -> KeyedSampler:
        """The sampler of the run for some turns."""
        decoding = self.cfg.decoding
        return KeyedSampler(
            temperature=decoding.temperature,
            top_k=decoding.top_k,
            top_p=decoding.top_p,
            seed=self.cfg.seed,
            prompt_hashes=hashes,
        )

    def text(self, tokens: Sequence[int]) -> str:
        """What a later turn shows of an answer."""
        return str(self.target.tokenizer.decode(tokens, skip_special_tokens=True))

    def keep_prefill(self, prompt: Prompt, turn: int, logits: Tensor, hidden: Tensor) -> None:
        """Store the prefill distribution and last hidden state of a turn."""
        settings = self.settings(prompt, turn, PLAIN)
        self.run.keep_prefill(settings, Prefill(logits, hidden))
