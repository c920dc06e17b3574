"""The drafter's optimizer: its work divided over ranks, the same weights on all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from stages_kit import composed, distill_arguments, executed
from torch import nn

from blockpilot.app.config import TrainingConfig
from blockpilot.distill import optimizer as optimizing
from blockpilot.distill.optimizer import HEAD_RATE, DrafterOptimizer, shares

STEPS = 4


def network() -> nn.Module:
    """Matrices of several shapes and the gain of a norm."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9, bias=False), nn.RMSNorm(9), nn.Linear(9, 4, bias=False))
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return net


def settings(*more: str) -> TrainingConfig:
    given = distill_arguments(Path(), Path(), *more)
    training: TrainingConfig = composed("distill", *given).training
    return training


def stepped(net: nn.Module, optimizer: DrafterOptimizer, first: int, n_steps: int) -> None:
    """Steps with gradients that depend on the step's number only."""
    for step in range(first, first + n_steps):
        generator = torch.Generator().manual_seed(step)
        for weight in net.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def weights_of(net: nn.Module) -> list[list[float]]:
    return [weight.detach().flatten().tolist() for weight in net.parameters()]


def resumed() -> list[list[float]]:
    """Weights after STEPS steps, with optimizer and state handed on half way."""
    net = network()
    optimizer = DrafterOptimizer(net, settings())
    stepped(net, optimizer, 0, STEPS // 2)
    state = optimizer.state()
    optimizer = DrafterOptimizer(net, settings())
    optimizer.load(state)
    stepped(net, optimizer, STEPS // 2, STEPS // 2)
    return weights_of(net)


def test_every_weight_moves_and_a_resumed_optimizer_ends_with_the_same_bits() -> None:
    net = network()
    before = weights_of(net)
    stepped(net, DrafterOptimizer(net, settings()), 0, STEPS)
    assert all(a != b for a, b in zip(before, weights_of(net), strict=True))
    assert weights_of(net) == resumed()


def test_a_matrix_moves_by_the_learning_rate_whatever_its_gradients_scale() -> None:
    """Root mean square of an update: about 0.2 learning rates, as with AdamW."""
    net = network()
    optimizer = DrafterOptimizer(net, settings())
    stepped(net, optimizer, 0, 1)  # the warm-up's first rate is 0
    assert optimizer.learning_rate > 0
    rate, before = optimizer.learning_rate, weights_of(net)[0]
    for weight in net.parameters():
        weight.grad = 1e-3 * torch.randn(weight.shape)
    optimizer.step()
    moved = torch.tensor(weights_of(net)[0]) - torch.tensor(before)
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * rate, rel=0.5)


def test_weight_decay_reaches_every_weight() -> None:
    """Also those that Muon does not have, whose optimizer has a default of its own."""
    moved = []
    for decay in (0.0, 0.5):
        net = network()
        optimizer = DrafterOptimizer(net, settings(f"training.weight_decay={decay}"))
        for weight in net.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        ends = zip(net.parameters(), network().parameters(), strict=True)
        moved.append([not torch.equal(after, before) for after, before in ends])
    assert moved == [[False] * 3, [True] * 3]


def test_the_rows_of_a_head_move_by_a_share_of_the_learning_rate() -> None:
    net = nn.Sequential()
    net.add_module("norm", nn.RMSNorm(6))
    net.add_module("lm_head", nn.Linear(6, 9, bias=False))
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    given = settings("training.weight_decay=0")
    stepped(net, DrafterOptimizer(net, given), 0, 1)
    moved = {n: (w - before[n]).abs() / given.learning_rate for n, w in net.named_parameters()}
    torch.testing.assert_close(moved["norm.weight"], torch.ones(6), rtol=1e-3, atol=0)
    torch.testing.assert_close(
        moved["lm_head.weight"], torch.full((9, 6), HEAD_RATE), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("fast", [True, False])
def test_muon_computes_in_16_bits_only_where_a_device_can(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizing, "has_16_bit_products", lambda device: fast)
    net, given = network(), settings("training.weight_decay=0")
    with torch.no_grad():
        net[0].weight.zero_()
    stepped(net, DrafterOptimizer(net, given), 0, 1)
    # match_rms_adamw scales the orthogonal matrix by 0.2 sqrt(longer side).
    update = net[0].weight.detach() / (given.learning_rate * 0.2 * 3)
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.3 * values.max(), "orthogonal, roughly"
    rounding = (update - update.bfloat16().float()).abs().max()
    assert (rounding < 1e-6) == fast


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_shares_hold_every_matrix_once(n: int) -> None:
    matrices = [torch.empty(a, b) for a, b in ((4, 8), (8, 8), (8, 4), (2, 8), (16, 4))]
    given = shares(matrices, n)
    assert len(given) == n
    assert sorted(id(m) for share in given for m in share) == sorted(map(id, matrices))


def test_two_ranks_end_with_the_weights_of_one(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import json, os\n"
        "from pathlib import Path\n"
        "from accelerate import PartialState\n"
        "from test_optimizer import resumed\n"
        "processes = PartialState(cpu=True)\n"
        "rank = os.environ['RANK']\n"
        "open(f'weights{rank}.json', 'w').write(json.dumps(resumed()))\n"
        "processes.wait_for_everyone(); processes.destroy_process_group()\n"
        "tasks = Path('/proc/self/task').iterdir()\n"
        "threads = [(task / 'comm').read_text() for task in tasks]\n"
        "assert not [name for name in threads if 'gloo' in name], threads\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    code, _, told = executed(launcher, tmp_path)
    assert code == 0, told
    alone = resumed()
    for rank in range(2):
        assert json.loads((tmp_path / f"weights{rank}.json").read_text()) == alone
