"""Every test starts as a process of its own launch, whatever started pytest."""

import pytest

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BLOCKPILOT_RUN_ID", "HYDRA_FULL_ERROR")


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
