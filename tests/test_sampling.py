"""The keyed sampler: its law against softmax, its independence, and that it is one function.

A sampler that is wrong for all methods alike would pass every law of equality, so its output is
tested against softmax itself. All seeds are fixed: a p-value here is a constant of the code.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from decoding_kit import KINDS, VOCAB, tiny_target
from omegaconf import OmegaConf
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from blockpilot.app.config import DecodingConfig, typed
from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.sampling import (
    KeyedLogitsProcessor,
    KeyedSampler,
    gumbel,
    sampling_key,
)
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.fixed import FixedPolicy

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
CPU = torch.device("cpu")


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Chi-square tail of counts against expected counts, all of them above 5."""
    assert expected.min() > 5
    statistic = ((observed - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor((observed.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic.double() / 2))


def counts(tokens: Tensor, size: int) -> Tensor:
    return torch.bincount(tokens, minlength=size).double()


def draws(logits: Tensor, n_prompts: int, n_positions: int, **settings: Any) -> Tensor:
    """Tokens [n_prompts, n_positions] for the same logits everywhere."""
    hashes = [f"{i:016x}" for i in range(n_prompts)]
    choose = KeyedSampler(prompt_hashes=hashes, **settings)
    places = torch.arange(n_positions)
    rows = logits.expand(n_positions, -1)
    return torch.stack(
        [choose.scores(rows, places, row=i).argmax(dim=-1) for i in range(n_prompts)]
    )


# --- the law -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_law_is_softmax(temperature: float, seed: int, filters: dict[str, Any]) -> None:
    kept = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if "top_k" in filters:
        kept.append(TopKLogitsWarper(filters["top_k"]))
    if "top_p" in filters:
        kept.append(TopPLogitsWarper(filters["top_p"]))
    law = kept(torch.zeros(1, 1, dtype=torch.int64), LOGITS[None])[0].double().softmax(dim=-1)
    tokens = draws(LOGITS, 100, 400, temperature=temperature, seed=seed, **filters)
    seen = counts(tokens.flatten(), 8)
    assert seen[law == 0].sum() == 0
    assert p_value(seen[law > 0], law[law > 0] * tokens.numel()) > 1e-4


def test_the_law_holds_for_a_wide_vocabulary() -> None:
    """Ids past 2^16, as real vocabularies have: all alike, so each eighth gets its share."""
    vocab = 80_000
    tokens = draws(torch.zeros(vocab), 4, 60, temperature=1.0).flatten()
    share = torch.full((8,), 30.0)
    assert p_value(counts(tokens % 8, 8), share) > 1e-4
    assert p_value(counts(tokens * 8 // vocab, 8), share) > 1e-4


def test_another_law_would_be_noticed() -> None:
    """The chi-square test at this sample size sees a temperature that is 5% off."""
    tokens = draws(LOGITS, 100, 400, temperature=1.05)
    assert p_value(counts(tokens.flatten(), 8), LOGITS.double().softmax(-1) * 40_000) < 1e-4


def pairs_p_value(first: Tensor, second: Tensor) -> float:
    """Chi-square of pairs of tokens against the product of the law with itself."""
    law = LOGITS[:6].double().softmax(dim=-1)
    seen = counts((first * 6 + second).flatten(), 36)
    return p_value(seen, torch.outer(law, law).flatten() * first.numel())


@pytest.mark.parametrize("lag", [1, 2, 7, 16, 64])
def test_positions_are_independent(lag: int) -> None:
    tokens = draws(LOGITS[:6], 100, 400, temperature=1.0)
    assert pairs_p_value(tokens[:, :-lag], tokens[:, lag:]) > 1e-4


@pytest.mark.parametrize("lag", [1, 10])
def test_prompts_are_independent(lag: int) -> None:
    tokens = draws(LOGITS[:6], 100, 400, temperature=1.0)
    assert pairs_p_value(tokens[:-lag], tokens[lag:]) > 1e-4


@pytest.mark.parametrize("seeds", [(0, 1), (0, 2), (7, 8), (1, 2**31)])
def test_seeds_are_independent(seeds: tuple[int, int]) -> None:
    first, second = (draws(LOGITS[:6], 50, 400, temperature=1.0, seed=seed) for seed in seeds)
    assert pairs_p_value(first, second) > 1e-4


# --- the noise ---------------------------------------------------------------------------------


def noise(seed: int, prompt: str, positions: Tensor, vocab: int = 1000) -> Tensor:
    return gumbel(torch.tensor(sampling_key(seed, prompt)), positions, vocab, CPU)


def test_noise_is_standard_gumbel() -> None:
    sample = noise(0, "a", torch.arange(1000)).double().flatten()
    n = sample.numel()
    euler, variance = 0.5772156649, math.pi**2 / 6
    assert abs(sample.mean() - euler) < 4.5 * math.sqrt(variance / n)
    # The kurtosis of a Gumbel variable is 5.4, so its variance estimate has variance 4.4 v^2 / n.
    assert abs(sample.var() - variance) < 4.5 * variance * math.sqrt(4.4 / n)
    assert sample.isfinite().all()


def test_every_bit_of_the_hash_is_balanced() -> None:
    """exp(-exp(-g)) gives the uniform back; float32 noise keeps its 20 leading bits or so."""
    key = torch.tensor(sampling_key(3, "b"))
    sample = gumbel(key, torch.arange(500), 1000, CPU).double().flatten()
    word = ((-(-sample).exp()).exp() * 2**32).to(torch.int64)
    for bit in range(12, 32):
        share = ((word >> bit) & 1).double().mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / math.sqrt(word.numel()), bit


def test_all_32_bits_are_balanced_and_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[Tensor] = []
    to = torch.Tensor.to

    def keep(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args == (torch.float64,):
            words.append(self.clone())
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", keep)
    noise(0, "c", torch.arange(300))
    bits = (words[0].flatten()[None] >> torch.arange(32)[:, None]) & 1  # [32, n]
    n = bits.shape[1]
    signs = 2.0 * bits.double() - 1
    assert signs.mean(dim=1).abs().max() < 4.5 / math.sqrt(n)
    product = signs @ signs.T / n - torch.eye(32)
    assert product.abs().max() < 5 / math.sqrt(n)
    assert words[0].min() >= 0
    assert words[0].max() < 2**32


def test_noise_does_not_correlate() -> None:
    """Over positions, prompts and seeds, at equal ids and at ids one apart."""
    places = torch.arange(200)
    base = noise(0, "a", places).double()
    others = {
        "position": noise(0, "a", places + 1),
        "far position": noise(0, "a", places + 1024),
        "prompt": noise(0, "b", places),
        "seed": noise(1, "a", places),
        "next id": base.roll(1, dims=1),
    }
    for name, other in others.items():
        r = torch.corrcoef(torch.stack([base.flatten(), other.double().flatten()]))[0, 1]
        assert abs(r) < 4.5 / math.sqrt(base.numel()), name


def test_no_two_positions_share_their_noise() -> None:
    rows = noise(0, "a", torch.arange(3000), vocab=4)
    assert len({tuple(row) for row in rows.tolist()}) == 3000


def test_noise_is_the_same_for_any_subset_and_order() -> None:
    places = torch.arange(5, 40)
    whole = noise(0, "a", places)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise(0, "a", places[order]), whole[order])
    assert torch.equal(noise(0, "a", places[7:9]), whole[7:9])
    assert torch.equal(noise(0, "a", places[3:4]), whole[3:4])
    assert torch.equal(noise(0, "a", places, vocab=10), whole[:, :10])


PINNED_KEY = (537306959, 2446032653)
PINNED = [[0.2746086, 1.1470333, -0.4387855], [1.5391897, 0.1568180, 1.9127520]]


def test_noise_is_pinned() -> None:
    """Stored responses are replayed by it: another value is another version of every data set."""
    assert sampling_key(0, "prompt") == PINNED_KEY
    got = noise(0, "prompt", torch.tensor([0, 12345]), vocab=3)
    torch.testing.assert_close(got, torch.tensor(PINNED), atol=1e-6, rtol=0)


# --- one function in every setting -------------------------------------------------------------


def random_logits(n: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(n, 50, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}], ids=str
)
def test_a_batch_of_prompts_equals_each_alone(settings: dict[str, float]) -> None:
    hashes = ["a", "b", "c", "d"]
    logits, places = random_logits(4), torch.tensor([3, 9, 9, 100])
    choose = KeyedSampler(prompt_hashes=hashes, seed=5, **settings)  # type: ignore[arg-type]
    batch = choose.scores(logits, places, row=None)
    for i, name in enumerate(hashes):
        alone = KeyedSampler(prompt_hashes=[name], seed=5, **settings)  # type: ignore[arg-type]
        assert torch.equal(alone.scores(logits[i : i + 1], places[i : i + 1])[0], batch[i])
        assert torch.equal(choose.scores(logits[i : i + 1], places[i : i + 1], row=i)[0], batch[i])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lowest_id(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def silence(key: Tensor, positions: Tensor, vocab: int, device: object) -> Tensor:
        return torch.zeros(positions.shape[0], vocab)

    monkeypatch.setattr("blockpilot.decoding.sampling.gumbel", silence)
    logits = torch.zeros(3, 100)
    logits[0, [40, 41, 99]] = 2.0
    logits[1, [7, 98]] = 2.0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        got = KeyedSampler(temperature=temperature)(logits.to(dtype), torch.arange(3))
        assert got.tolist() == [40, 7, 0]


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_logits_that_are_not_finite_give_minus_one(filters: dict[str, Any]) -> None:
    for bad, temperature in itertools.product((math.nan, math.inf), (0.0, 1e-6, 1.0)):
        logits = random_logits(4)
        logits[1, 17] = bad
        logits[2] = bad
        choose = KeyedSampler(temperature=temperature, **filters)
        tokens = choose(logits, torch.arange(4)).tolist()
        assert tokens[1:3] == [-1, -1], (bad, temperature)
        assert tokens[0] == choose(logits[:1], torch.tensor([0])).item() >= 0
        assert tokens[3] >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_minus_infinity_forbids_a_token_and_all_of_them_is_an_error(temperature: float) -> None:
    logits = torch.full((2, 50), -math.inf)
    logits[0, 31] = -5.0
    assert KeyedSampler(temperature=temperature)(logits, torch.arange(2)).tolist() == [31, -1]


def test_low_precision_logits_are_upcast() -> None:
    """Noise added in bf16 would round scores near 20 to steps of 0.125."""
    logits = (random_logits(64) + 20).to(torch.bfloat16)
    places = torch.arange(64)
    choose = KeyedSampler(temperature=1.0)
    for low in (logits, logits.to(torch.float16)):
        scores = choose.scores(low, places)
        assert scores.dtype == torch.float32
        assert torch.equal(scores, choose.scores(low.float(), places))
    assert choose.scores(logits.double(), places).dtype == torch.float64


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_a_tiny_temperature_is_greedy(filters: dict[str, Any]) -> None:
    logits, places = random_logits(300), torch.arange(300)
    greedy = KeyedSampler()(logits, places)
    assert torch.equal(greedy, logits.argmax(dim=-1))
    for temperature in (1e-300, 1e-8, 1e-6):
        choose = KeyedSampler(temperature=temperature, **filters)
        assert torch.equal(choose(logits, places), greedy), temperature


# --- filters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_top_k_keeps_what_transformers_keeps(temperature: float) -> None:
    logits = random_logits(40)
    logits[:20] = logits[:20].round()  # ties
    for top_k in (1, 2, 7, 49, 50, 51, 1000):
        want = TopKLogitsWarper(top_k)(torch.zeros(40, 1), logits).isfinite()
        choose = KeyedSampler(temperature=temperature, top_k=top_k)
        assert torch.equal(choose.scores(logits, torch.arange(40)).isfinite(), want), top_k


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_top_p_keeps_what_transformers_keeps(temperature: float) -> None:
    for top_p, top_k in itertools.product((1e-9, 0.1, 0.5, 0.9, 0.999), (0, 20)):
        compare_top_p(top_p, top_k, temperature)


def compare_top_p(top_p: float, top_k: int, temperature: float) -> None:
    logits = random_logits(40)
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    chain.append(TopPLogitsWarper(top_p))
    want = chain(torch.zeros(40, 1, dtype=torch.int64), logits).isfinite()
    choose = KeyedSampler(temperature=temperature, top_k=top_k, top_p=top_p)
    kept = choose.scores(logits, torch.arange(40)).isfinite()
    assert torch.equal(kept, want)
    assert kept.any(dim=-1).all()


def test_top_k_of_one_is_greedy() -> None:
    logits, places = random_logits(100), torch.arange(100)
    got = KeyedSampler(temperature=2.0, top_k=1)(logits, places)
    assert torch.equal(got, logits.argmax(dim=-1))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.1),
        ("top_p", math.nan),
    ],
)
def test_bad_values_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"decoding\.{setting}=.*allowed are"):
        KeyedSampler(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["min_p", "typical_p", "repetition_penalty"])
def test_a_filter_that_is_not_supported_is_refused_by_name(name: str) -> None:
    known = {"max_new_tokens": 8, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with pytest.raises(UserError, match=rf"unknown key {name}.*top_k, top_p"):
        typed(OmegaConf.create(known | {name: 0.5}), DecodingConfig)


# --- batched generation ------------------------------------------------------------------------

PROMPTS = [[5, 17, 3], [9, 8, 7, 6, 50, 41, 40, 12], [30], [22, 23, 24, 25, 26]]


def generated(target: Any, choose: KeyedSampler, budget: int) -> list[list[int]]:
    """New tokens of a left-padded batch under transformers' `generate`."""
    width = max(map(len, PROMPTS))
    padding = torch.tensor([width - len(prompt) for prompt in PROMPTS])
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    out = target.model.generate(
        input_ids=ids,
        attention_mask=(torch.arange(width)[None] >= padding[:, None]).long(),
        do_sample=False,
        max_new_tokens=budget,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([KeyedLogitsProcessor(choose, padding)]),
    )
    return out[:, width:].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}], ids=str
)
def test_batched_generate_gives_the_tokens_of_the_loop(
    kind: str, settings: dict[str, float]
) -> None:
    target, budget = tiny_target(kind), 20
    hashes = [str(prompt) for prompt in PROMPTS]
    batch = KeyedSampler(prompt_hashes=hashes, seed=3, **settings)  # type: ignore[arg-type]
    texts = generated(target, batch, budget)
    method = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode="draft"))
    method.bind(target)
    for prompt, name, text in zip(PROMPTS, hashes, texts, strict=True):
        alone = KeyedSampler(prompt_hashes=[name], seed=3, **settings)  # type: ignore[arg-type]
        assert decode(target, method, prompt, alone, budget).tokens == text
    assert len({tuple(text) for text in texts}) == len(texts)
    assert all(0 <= token < VOCAB for text in texts for token in text)
