"""Stage `generate`: answer one prompt and show the text as it is committed.

    echo "Why is the sky blue?" | python -m blockpilot.generate
    echo "Why is the sky blue?" | python -m blockpilot.generate policy=fixed block_size=8
    python -m blockpilot.generate prompt_file=question.txt decoding.temperature=0.7

In a notebook:

    pair = open_pair()
    answer = pair.answer("Why is the sky blue?")
    print(answer.text, answer.tau)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from hydra.utils import instantiate
from transformers import PreTrainedTokenizerBase, TextStreamer

from blockpilot.app.config import GenerateConfig, typed
from blockpilot.app.job import stage
from blockpilot.app.target import load_target
from blockpilot.base.errors import UserError
from blockpilot.base.paths import conf_dir
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.protocols import Adaptive
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.types import Trace, source_of
from blockpilot.prompts.base import UNASSIGNED, Prompt
from blockpilot.prompts.render import render


@dataclass(frozen=True)
class Answer:
    """What the target said, and how fast the method got it said."""

    text: str
    trace: Trace

    @property
    def tau(self) -> float | None:
        """Tokens committed per cycle; None when there was no cycle."""
        cycles = len(self.trace.committed)
        return sum(self.trace.committed) / cycles if cycles else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the prefill's per second of decoding."""
        trace = self.trace
        return (len(trace.tokens) - 1) / trace.decode_s if trace.committed else None

    @property
    def cycles(self) -> str:
        """How many cycles drafted, copied from the text or decoded plainly."""
        sources = Counter(map(source_of, self.trace.drafted, self.trace.verified))
        counts = {
            "drafted": sources["draft"],
            "copied": sources["copy"],
            "plain": sources["plain"],
        }
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


class Pair:
    """A target with a method, ready to answer."""

    def __init__(self, cfg: GenerateConfig) -> None:
        if cfg.block_size is not None and "block_size" not in cfg.policy:
            raise UserError(
                f"block_size={cfg.block_size}: it is of policy=fixed, which is not the policy here"
            )
        self.cfg = cfg
        drafter = instantiate(cfg.drafter, _convert_="all")
        policy = instantiate(cfg.policy, _convert_="all")
        self.method = Method(drafter, policy)
        self.target = load_target(cfg)
        self.method.bind(self.target)
        if isinstance(drafter, Adaptive):
            drafter.learn(None)  # from answer to answer; nothing is kept

    def answer(self, prompt: str, show: Callable[[str], object] = lambda text: None) -> Answer:
        """Answer a user message; `show` gets the text piece by piece as it is committed."""
        cfg, tokenizer = self.cfg, self.target.tokenizer
        ids = render(
            tokenizer,
            [{"role": "user", "content": prompt}],
            cfg.model.thinking,
            cfg.model.template_date,
        )
        key = Prompt(id="prompt", set="generate", turns=(prompt,), split=UNASSIGNED).hash
        sampler = KeyedSampler(
            temperature=cfg.decoding.temperature,
            top_k=cfg.decoding.top_k,
            top_p=cfg.decoding.top_p,
            seed=cfg.seed,
            prompt_hashes=[key],
        )
        streamer = _Streamer(tokenizer, show)
        trace = decode(
            self.target, self.method, ids, sampler, cfg.decoding.max_new_tokens, emit=streamer.feed
        )
        streamer.end()
        return Answer(str(tokenizer.decode(trace.tokens, skip_special_tokens=True)), trace)


def open_pair(*overrides: str) -> Pair:
    """The pair that `python -m blockpilot.generate <overrides>` would use."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = hydra.compose("generate", ["run_id=notebook", *overrides])
    return Pair(typed(cfg, GenerateConfig))


class _Streamer(TextStreamer):
    """Hands over text as soon as it cannot change any more."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._show = show

    def feed(self, tokens: list[int]) -> None:
        self.put(torch.tensor(tokens))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._show(text)


def read_prompt(cfg: GenerateConfig) -> str:
    """`prompt=`, else `prompt_file=`, else standard input; UserError when it is empty."""
    if cfg.prompt is not None and cfg.prompt_file is not None:
        raise UserError("prompt and prompt_file are both given; give one")
    if cfg.prompt is not None:
        where, text = "prompt", cfg.prompt
    elif cfg.prompt_file is not None:
        where = f"prompt_file={cfg.prompt_file}"
        try:
            text = Path(cfg.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: cannot read it ({error})") from error
    else:
        where, text = "standard input", "" if sys.stdin.isatty() else sys.stdin.read()
    if not text.strip():
        raise UserError(f"{where} is empty; write prompt=..., prompt_file=... or pipe a text")
    return text.strip()


def run(cfg: GenerateConfig) -> Answer:
    """Answer the prompt on standard output; tau and speed go to standard error."""
    prompt = read_prompt(cfg)
    pair = Pair(cfg)
    answer = pair.answer(prompt, lambda text: print(text, end="", flush=True))
    tau = "-" if answer.tau is None else f"{answer.tau:.2f}"
    speed = "-" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.1f}"
    n_tokens = len(answer.trace.tokens)
    cycles = f"; cycles: {answer.cycles}" if answer.cycles else ""
    print(f"\n[{n_tokens} tokens, tau {tau}, {speed} tokens/s{cycles}]", file=sys.stderr)
    return answer


@stage("generate", GenerateConfig)
def main(cfg: GenerateConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
