"""Which families of causal LM can be targets: each is built tiny, checked, and put under the laws.

    python scripts/targets.py                 # all families of the installed transformers
    python scripts/targets.py llama gpt2      # some
    python scripts/targets.py > conf/model/README.md    # what the README links to

For every `model_type` a random model of four layers is made in float64. What passes the checks that
loading makes (decoding/checks.py) must then decode plainly what `generate` says, decode with a
random drafter what plain decoding says, and replay what decoding did.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from blockpilot.base.errors import UserError
from blockpilot.decoding.checks import check_target
from blockpilot.decoding.loading import byte_tokenizer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.replay import replay
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.fixed import FixedPolicy

DRAFTER: dict[str, Any] = {"checkpoint": "random", "ignore_keys": [], "head": None}
LOADS, REFUSED, BROKEN = "Loads", "Refused", "Loads, and breaks a law"
NOT_TRIED = "Not tried"
HEAD = """# Targets, family by family

What `python scripts/targets.py` finds with transformers {version}: every `model_type` of a causal
LM, built tiny with random weights in float64. One that loads keeps the laws: plain decoding equals
`generate`, decoding with a drafter equals plain decoding, a replay equals decoding. One that is
refused is told so in one line when it is loaded, before any prompt is read. A checkpoint can differ
from the tiny model of its family; what it is gets checked again when it is loaded."""
LARGEST = 5_000_000  # parameters of a model that counts as tiny
PROMPT = [5, 17, 3, 42, 8]
BUDGET = 12
SIZE = 5

# Values by the names that configurations give them; a family gets those that it knows.
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.25,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # embeddings per layer
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
OWN: dict[str, dict[str, Any]] = {  # what a family cannot be built or judged without
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "stablelm": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "gpt_oss": {"sliding_window": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"final_logit_softcapping": 3.0},
}


def tiny_model(family: str) -> PreTrainedModel:
    """A random causal LM of a `model_type` in float64; raises what its classes raise."""
    default = CONFIG_MAPPING[family]().get_text_config()
    known = default.to_dict()
    known |= {name: known.get(own) for name, own in default.attribute_map.items()}
    values = {name: value for name, value in SMALL.items() if known.get(name) is not None}
    if kinds := known.get("layer_types"):
        chosen = list(dict.fromkeys(kinds))
        values["layer_types"] = [chosen[place % len(chosen)] for place in range(4)]
    if "kv_lora_rank" in values:  # latent attention has one key a head
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= OWN.get(family, {})
    config = type(default)(**values)
    # The default, a grouped product, knows no float64.
    config._experts_implementation = "eager"
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > LARGEST:
        raise ValueError(f"it has {size:,} parameters at the sizes known here")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 0.25)
    model.generation_config.eos_token_id = None  # nothing ends a text early
    return model


def broken_law(model: PreTrainedModel) -> str | None:
    """The first law that a target breaks, or None. Raises UserError for a model that is refused."""
    target = Target(model, byte_tokenizer())
    check_target(target)
    target.stop_ids = frozenset()
    ids = torch.tensor([PROMPT])
    drafter = DFlashDrafter(**DRAFTER)
    drafter.bind(target)
    policy = FixedPolicy(block_size=SIZE, block_mode="draft")
    sized = Method(drafter, policy)
    alone = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode="draft"))
    for method in (sized, alone):
        method.bind(target)
    for temperature in (0.0, 1.0):
        sampler = KeyedSampler(temperature=temperature, prompt_hashes=["prompt"])
        plain = decode(target, alone, PROMPT, sampler, BUDGET)
        if temperature == 0:
            said = model.generate(
                ids,
                generation_config=GenerationConfig(
                    max_new_tokens=BUDGET, do_sample=False, eos_token_id=None, pad_token_id=0
                ),
            )
            if said[0, len(PROMPT) :].tolist() != plain.tokens:
                return "plain decoding differs from generate"
        drafted = decode(target, sized, PROMPT, sampler, BUDGET)
        if drafted.tokens != plain.tokens:
            return "decoding with a drafter differs from plain decoding"
        text = torch.tensor([*PROMPT, *plain.tokens])
        target.capture(drafter.feature_layers)
        with torch.inference_mode():
            features = target.forward(text[:-1], target.new_cache(len(text)), 1).features
        blocks = policy.replay_blocks()
        found = replay(drafter, text, len(PROMPT), features, blocks, chunk=64)
        replayed = found.trace(blocks[0], plain.tokens, plain.stop_reason)
        if replayed.committed != drafted.committed:
            return "a replay differs from decoding"
    return None


def verdicts(families: list[str]) -> Iterator[tuple[str, str, str]]:
    """(family, verdict, reason) of each."""
    for family in families:
        try:
            model = tiny_model(family)
        except Exception as error:  # classes of a hundred families, each with its own ways
            yield family, NOT_TRIED, _first_line(error)
            continue
        try:
            broken = broken_law(model)
        except UserError as error:
            yield family, REFUSED, str(error).removeprefix(f"{model.config.model_type}: ")
            continue
        except Exception as error:
            yield family, "defect", _first_line(error)
            continue
        yield family, BROKEN if broken else LOADS, broken or ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:90]}"


def main() -> None:
    """Print the table as Markdown."""
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    logging.getLogger("blockpilot").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    families = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows = []
    for row in verdicts(families):
        print(*row, sep="\t", file=sys.stderr, flush=True)
        rows.append(row)
    print(HEAD.format(version=transformers.__version__))
    for state in (LOADS, BROKEN, REFUSED, NOT_TRIED):
        mine = [row for row in rows if row[1] == state]
        print(f"\n## {state}: {len(mine)}\n")
        if state == LOADS:
            print(", ".join(family for family, _, _ in mine))
            continue
        for reason in dict.fromkeys(row[2] for row in mine):
            names = ", ".join(row[0] for row in mine if row[2] == reason)
            print(f"- {names}: {reason}")


if __name__ == "__main__":
    main()
