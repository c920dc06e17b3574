"""Numbers that the papers print, beside which measured ones are set: speedup and tau.

BlockPilot (arXiv 2606.31315), means of DFlash and BlockPilot; the digits in brackets of some
digests differ by up to 0.2 and are not used. DFlash (arXiv 2602.06036): DFlash and EAGLE-3 per set
at T = 0, means of EAGLE-3.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One cell of a paper's table."""

    speedup: float
    tau: float


MEAN = "mean"
MEANS_OVER = (
    "Published means: DFlash and BlockPilot over GSM8K, MATH-500, AIME24, HumanEval, MBPP, "
    "SWE-Bench and MT-Bench; EAGLE-3 over GSM8K, MATH-500, AIME25, HumanEval, MBPP and MT-Bench."
)
_MEANS: dict[tuple[str, float], dict[str, tuple[float, float]]] = {
    ("qwen3-4b", 0.0): {
        "dflash16": (3.99, 6.31),
        "blockpilot": (4.17, 6.59),
        "eagle3_60": (2.08, 3.48),
    },
    ("qwen3-4b", 1.0): {
        "dflash16": (3.80, 5.42),
        "blockpilot": (4.20, 5.92),
        "eagle3_16": (1.72, 2.95),
        "eagle3_60": (1.93, 3.36),
    },
    ("qwen3-8b", 0.0): {
        "dflash16": (4.42, 6.13),
        "blockpilot": (4.66, 6.46),
        "eagle3_60": (2.02, 3.40),
    },
    ("qwen3-8b", 1.0): {
        "dflash16": (3.55, 5.03),
        "blockpilot": (3.94, 5.73),
        "eagle3_16": (1.68, 2.83),
        "eagle3_60": (1.88, 3.26),
    },
    ("llama3.1-8b", 0.0): {"dflash16": (3.03, 4.48), "blockpilot": (3.25, 4.82)},
    ("qwen3-coder-30b", 0.0): {"dflash16": (3.86, 5.68), "blockpilot": (4.12, 6.05)},
}
_GREEDY: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("qwen3-4b", "dflash16"): {
        "gsm8k": (5.15, 6.53),
        "math500": (6.09, 7.84),
        "aime25": (5.68, 7.27),
        "humaneval": (5.21, 6.64),
        "mbpp": (4.78, 6.09),
        "mt-bench": (2.85, 4.35),
    },
    ("qwen3-4b", "eagle3_60"): {
        "gsm8k": (2.27, 3.77),
        "math500": (2.10, 3.52),
        "aime25": (2.13, 3.51),
        "humaneval": (2.12, 3.47),
        "mbpp": (2.02, 3.38),
    },
    ("qwen3-8b", "dflash16"): {
        "gsm8k": (5.15, 6.54),
        "math500": (6.08, 7.87),
        "aime25": (5.62, 7.08),
        "humaneval": (5.14, 6.50),
        "mbpp": (4.65, 5.95),
        "mt-bench": (2.75, 4.24),
    },
    ("qwen3-8b", "eagle3_60"): {
        "gsm8k": (2.23, 3.71),
        "math500": (2.05, 3.49),
        "aime25": (2.05, 3.44),
        "humaneval": (2.17, 3.65),
        "mbpp": (1.93, 3.25),
        "mt-bench": (2.02, 3.26),
    },
}


def published(target: str, temperature: float, method: str, prompt_set: str) -> Published | None:
    """What a paper prints for a method on a prompt set, or on `mean`; None where it prints nothing.

    `dflash16`, `blockpilot`, `eagle3_16` and `eagle3_60` are the methods that the papers name.
    """
    if prompt_set == MEAN:
        cell = _MEANS.get((target, temperature), {}).get(method)
    else:
        cell = _GREEDY.get((target, method), {}).get(prompt_set) if temperature == 0 else None
    return None if cell is None else Published(*cell)
