"""The processes of one launch: which one this is, where they meet, the run id that they share."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from blockpilot.base.errors import UserError

RUN_ID = "BLOCKPILOT_RUN_ID"
WAIT = timedelta(days=30)
"""For other processes of a launch: their work takes as long as it takes, and who dies ends all."""


@dataclass(frozen=True)
class World:
    """This process among those of one launch; `local_rank` counts on its own machine."""

    rank: int
    size: int
    local_rank: int


def world() -> World:
    """Read RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them; one process without them.

    Raises:
        UserError: the variables are incomplete or contradict each other.
    """
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables = ", ".join(f"{name}={value}" for name, value in given.items())
    try:
        size = int(given["WORLD_SIZE"] or 1)
        rank = int(given["RANK"] or 0)
        local_rank = int(given["LOCAL_RANK"] or rank)
    except ValueError:
        raise UserError(f"{variables}: must be whole numbers") from None
    if not 0 <= rank < size or local_rank < 0 or (size > 1 and given["RANK"] is None):
        raise UserError(f"{variables}: must hold 0 <= RANK < WORLD_SIZE; start with torchrun")
    return World(rank, size, local_rank)


def run_id() -> str:
    """Return the id of this launch, the same in all its processes.

    $BLOCKPILOT_RUN_ID, or time and chance; processes that torchrun started agree on one.

    Raises:
        UserError: there are several processes and no way to agree.
    """
    given = os.environ.get(RUN_ID)
    if given:
        return given
    drawn = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if world().size == 1:
        return drawn
    if (store := _launch_store()) is None:
        raise UserError(f"several processes need one run id: set {RUN_ID} or start with torchrun")
    # The first to come decides; a restarted rank finds the id of the interrupted run.
    agreed: str = store.compare_set("blockpilot/run_id", "", drawn).decode()
    return agreed


def meet(place: str) -> None:
    """Wait until every process of this launch has come to `place`, a name used once per launch.

    Processes that torchrun did not start have no place to meet and go on.
    """
    if (store := _launch_store()) is None:
        return
    key = f"blockpilot/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{place}"
    if store.add(key, 1) == world().size:
        store.set(f"{key}/all", "here")
    store.wait([f"{key}/all"], WAIT)


def _launch_store() -> Any:
    """torchrun's own key-value store, which all its processes reach; None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=60),
    )
