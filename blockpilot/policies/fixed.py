"""Policy `fixed`: one block size for every prompt and cycle."""

from __future__ import annotations

from blockpilot.base.errors import UserError
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.types import BLOCK_MODES, Block, Draft, Verdict, View


def block_of(block_size: int, block_mode: str, drafter: Drafter) -> Block:
    """What a bound drafter sees and what is verified for a block size.

    In mode `draft` the drafter sees `block_size` slots; in mode `verify` it sees the trained block
    and the first `block_size` slots are verified. Raises UserError for sizes that cannot be.
    """
    trained_block_size = drafter.trained_block_size
    if block_mode not in BLOCK_MODES:
        raise UserError(f"block_mode={block_mode}: allowed are {', '.join(BLOCK_MODES)}")
    if block_size < 1:
        raise UserError(f"block size {block_size}: allowed are sizes >= 1 (1 is plain decoding)")
    if block_mode == "draft" or block_size == 1:
        return Block(block_size, block_size)
    if trained_block_size is not None and not drafter.has_marginals:
        raise UserError(
            f"block_mode=verify: drafter {drafter.name} fills no block whose first slots could be "
            "verified alone; allowed is draft"
        )
    if trained_block_size is None or block_size > trained_block_size:
        raise UserError(
            f"block size {block_size} in block_mode=verify: allowed are 1..{trained_block_size} "
            "(the trained block size)"
        )
    return Block(trained_block_size, block_size)


class FixedPolicy:
    """Verifies the same number of slots in every cycle.

    `block_size` None means the drafter's trained size, 1 where there is none.
    """

    name = "fixed"
    fingerprint: str | None = None
    speculates = True
    candidates = 0
    reads_clock = False
    tree = False

    def __init__(self, *, block_size: int | None, block_mode: str) -> None:
        self.block_size: int | None = block_size
        self.block_mode = block_mode

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        """Check the size against the drafter's trained one (UserError)."""
        if self.block_size is None:
            self.block_size = drafter.trained_block_size or 1
        self.fixed_block = block_of(self.block_size, self.block_mode, drafter)
        self.widest = self.fixed_block.drafted

    def start(self, view: View) -> None:
        """Reads nothing of the prompt."""

    def block(self, view: View) -> Block:
        return self.fixed_block

    def next(self, draft: Draft, view: View) -> Draft:
        return draft.cut(self.fixed_block.verified - 1)

    def observe(self, verdict: Verdict) -> None:
        """Nothing changes the size."""

    def replay_blocks(self) -> list[Block]:
        return [self.fixed_block]
