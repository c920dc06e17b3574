"""Scripted records for tests: no model, counts and times made up from the prompt's number.

Run as a program it plays a sweep into a folder, to be killed at any moment:
    python tests/records_kit.py FOLDER RANK WORLD_SIZE N_PROMPTS
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from blockpilot.records.schema import Settings, ok_row, row_key
from blockpilot.records.store import (
    Store,
    missing_prompts,
    read_table,
    shard,
    write_parquet,
)

SIZES = (1, 4, 8)
PROVENANCE = {
    "version": "0",
    "git_commit": None,
    "git_dirty": None,
    "python": "3",
    "libraries": {"torch": "2"},
    "host": "h",
    "cpu": "c",
    "gpu": None,
    "threads": 1,
}
# What may differ between an interrupted and an uninterrupted run, or between world sizes.
VARYING = ["run_id", "session_id", "rank", "world_size"]


@dataclass
class FakeTrace:
    tokens: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    quoted: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    stop_reason: str = "stop"
    prefill_s: float = 0.5
    decode_s: float = 1.0
    draft_s: float = 0.2
    verify_s: float = 0.7
    policy_s: float = 0.0
    other_s: float = 0.1
    cycle_s: list[float] | None = None


def make_trace(committed: Sequence[int], *, decode_s: float = 1.0, salt: int = 0) -> FakeTrace:
    """A trace with these commits; outputs are equal for equal lengths and salts."""
    n_tokens = sum(committed) + 1
    return FakeTrace(
        tokens=[salt + i for i in range(n_tokens)],
        committed=list(committed),
        drafted=[max(committed, default=1)] * len(committed),
        verified=[max(committed, default=1)] * len(committed),
        copied=[0] * len(committed),
        quoted=[0] * len(committed),
        repeated=[0] * len(committed),
        decode_s=decode_s,
    )


def make_settings(prompt: int | str = 0, size: int = 1, **changes: Any) -> Settings:
    plain = size == 1
    settings = Settings(
        prompt_id=f"set/{prompt}",
        prompt_hash=f"hash-{prompt}",
        prompt_set="set",
        split="test",
        turn=0,
        method="plain" if plain else f"dflash{size}",
        drafter="none" if plain else "dflash",
        drafter_checkpoint=None if plain else "sha256:1",
        policy="fixed",
        trained_block_size=None if plain else 8,
        block_size=size,
        block_mode="draft",
        target="target",
        target_revision=None,
        target_fingerprint="abc",
        tokenizer="def",
        weights="pretrained",
        temperature=0.0,
        top_k=None,
        top_p=None,
        seed=0,
        dtype="float32",
        attention="sdpa",
        engine="eager",
        device="cpu",
        thinking=None,
        template_date="2025-01-01",
        max_new_tokens=64,
        mode="decode",
    )
    return replace(settings, **changes)


def make_row(prompt: int = 0, size: int = 1, **changes: Any) -> dict[str, Any]:
    """One decoded row; prompt 4 of each seven stops on its first token, so it has no cycles."""
    committed = [1 + (prompt + i) % size for i in range(prompt % 7 + 3)]
    trace = make_trace([] if prompt % 7 == 4 else committed, decode_s=0.1 + prompt / size)
    return ok_row(make_settings(prompt, size, **changes), trace, prompt_ids=range(10 + prompt))


def open_store(folder: Path, rank: int = 0, world_size: int = 1, run_id: str = "run") -> Store:
    return Store(
        folder,
        run_id=run_id,
        rank=rank,
        world_size=world_size,
        settings={"seed": 0},
        provenance=PROVENANCE,
    )


def expected_keys(prompts: Sequence[int], sizes: Sequence[int] = SIZES) -> dict[str, list[str]]:
    return {f"set/{p}": [row_key(make_settings(p, size)) for size in sizes] for p in prompts}


def counting(folder: Path) -> pd.DataFrame:
    """What a sweep reads of its folder to know what is done."""
    rows: pd.DataFrame = read_table(folder, ["key", "status"]).to_pandas()
    return rows


def missing(folder: Path, expected: Mapping[str, Sequence[str]]) -> list[str]:
    """Prompts that a sweep would measure."""
    return missing_prompts(counting(folder), expected)


def play(folder: Path, rank: int, world_size: int, prompts: Sequence[int]) -> None:
    """A sweep without a model: what is missing of this rank's share, one append per prompt."""
    with open_store(folder, rank, world_size) as store:
        todo = set(missing(folder, expected_keys(prompts)))
        for prompt in shard(prompts, rank, world_size):
            if f"set/{prompt}" in todo:
                store.append(make_row(prompt, size) for size in SIZES)
                print(prompt, flush=True)
    write_parquet(folder)


if __name__ == "__main__":
    play(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), range(int(sys.argv[4])))
