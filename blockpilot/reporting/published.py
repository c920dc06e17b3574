"""Numbers that the papers print, beside which measured ones are set: speedup and tau.

BlockPilot (arXiv 2606.31315), means over GSM8K, MATH-500, AIME24, HumanEval, MBPP, SWE-Bench and
MT-Bench; the digits in brackets of some digests differ by up to 0.2 and are not used.
DFlash (arXiv 2602.06036), T = 0, per set.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One cell of a paper's table."""

    speedup: float
    tau: float


MEAN = "mean"
_BLOCKPILOT = {
    ("qwen3-4b", 0.0): ((3.99, 6.31), (4.17, 6.59)),
    ("qwen3-4b", 1.0): ((3.80, 5.42), (4.20, 5.92)),
    ("qwen3-8b", 0.0): ((4.42, 6.13), (4.66, 6.46)),
    ("qwen3-8b", 1.0): ((3.55, 5.03), (3.94, 5.73)),
    ("llama3.1-8b", 0.0): ((3.03, 4.48), (3.25, 4.82)),
    ("qwen3-coder-30b", 0.0): ((3.86, 5.68), (4.12, 6.05)),
}
_DFLASH = {
    "qwen3-4b": {
        "gsm8k": (5.15, 6.53),
        "math500": (6.09, 7.84),
        "aime25": (5.68, 7.27),
        "humaneval": (5.21, 6.64),
        "mbpp": (4.78, 6.09),
        "mt-bench": (2.85, 4.35),
    },
    "qwen3-8b": {
        "gsm8k": (5.15, 6.54),
        "math500": (6.08, 7.87),
        "aime25": (5.62, 7.08),
        "humaneval": (5.14, 6.50),
        "mbpp": (4.65, 5.95),
        "mt-bench": (2.75, 4.24),
    },
}


def published(target: str, temperature: float, method: str, prompt_set: str) -> Published | None:
    """What a paper prints for a method on a prompt set, or on `mean`; None where it prints nothing.

    `dflash16` and `blockpilot` are the methods that the papers name.
    """
    if prompt_set == MEAN:
        row = _BLOCKPILOT.get((target, temperature))
        place = {"dflash16": 0, "blockpilot": 1}.get(method)
        return None if row is None or place is None else Published(*row[place])
    cell = _DFLASH.get(target, {}).get(prompt_set)
    named = method == "dflash16" and temperature == 0
    return Published(*cell) if cell is not None and named else None
