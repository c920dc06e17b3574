"""config.json of an EAGLE-3 head in every published form, read into one description of a network.

SafeAILab's plain form and what SpecForge, AngelSlim and NVIDIA add to it, DeepSpec's, and
speculators', which nests the layers.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from blockpilot.base.errors import UserError
from blockpilot.drafters.forms.config import ConfigReader, check_layers
from blockpilot.drafters.forms.speculators import lifted

log = logging.getLogger(__name__)

_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
# What relatives of the network do otherwise, with the values at which they do the same. Trainers
# mean different things by norm_output, so outside speculators it is refused at every value.
_BUILT: dict[str, tuple[Any, ...]] = {
    "parallel_drafting": (False,),
    "eagle_config.use_aux_hidden_state": (True,),
}
_DEEPSPEC = "Qwen3Eagle3Model"
_NESTED = "eagle_config.eagle_aux_hidden_state_layer_ids"  # of layers
_TOP = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")  # of what enters them


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of a head.

    `target_layer_ids` are the target layers whose outputs it reads, in the order of their places
    in `feature_width`, which is that of the concatenated features. `embeds` says that the head has
    an embedding of its own; the target's serves otherwise.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    feature_width: int
    embeds: bool
    target_layer_ids: tuple[int, ...]
    form: str = "EAGLE-3"
    own_head: bool = True  # False: the target's LM head
    norm_queries: bool = False  # RMSNorm of queries and keys, as in Qwen3
    norm_before_fc: bool = False  # of the concatenated features
    fc_norm: bool = False  # of each tap's
    norm_before_residual: bool = False  # the residual stream begins with the normed feature
    norm_output: bool = False  # what a step hands to the next is normed

    @property
    def plain(self) -> bool:
        """Whether this is the plain network, which is trained and saved here."""
        return self.identity() == self.published()

    def identity(self) -> dict[str, Any]:
        """All that decides drafts beside the weights: `published` and what it cannot say."""
        own = [field for field in dataclasses.fields(self) if field.default != dataclasses.MISSING]
        return self.published() | {
            field.name: getattr(self, field.name)
            for field in own
            if getattr(self, field.name) != field.default
        }

    @classmethod
    def parse(
        cls,
        raw: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        where: str,
        depth: int,
        ignored: Sequence[str] = (),
    ) -> Eagle3Config:
        """From a published config.json; what it does not say reliably is read off the weights.

        `depth` is the target's number of layers, `ignored` are keys that count as absent. Raises
        UserError with the key or the tensor that is missing, wrong or of a head that is not built.
        """
        fields: dict[str, Any] = {}
        if "speculators_model_type" in raw:
            reader = ConfigReader(lifted(raw, where), where, ignored)
            reader.expect("speculators_model_type", "eagle3")
            reader.take("architectures")  # which varies
            fields["form"] = "speculators eagle3"
            fields["norm_output"] = bool(reader.flag("norm_output"))
            reader.take("embed_requires_grad")  # of training
            reader.expect("target_hidden_size", reader.peek("hidden_size"))
        else:
            reader = ConfigReader(raw, where, ignored)
            if reader.peek("architectures") == [_DEEPSPEC]:
                fields["form"] = "DeepSpec"
                reader.take("architectures")
            reader.expect("architectures", ["LlamaForCausalLMEagle3"], ["LlamaForCausalLM"])
        for key, built in _BUILT.items():
            reader.expect(key, *built)
        fields["norm_queries"] = reader.peek("model_type") == "qwen3"
        reader.expect("model_type", "llama", "qwen3")
        fields["norm_before_residual"] = bool(reader.flag("norm_before_residual"))
        fields["norm_before_fc"] = bool(reader.flag("norm_before_fc"))
        fields["fc_norm"] = bool(reader.flag("fc_norm", "use_aux_norm"))
        keys = (*_NUMBERS, "rms_norm_eps", "max_position_embeddings")
        shape = {key: reader.take(key) for key in keys}
        reader.expect("num_target_layers", depth)
        n_layers = reader.take("num_hidden_layers")
        n_layers = 1 if n_layers is None else n_layers
        reader.whole({"num_hidden_layers": n_layers}, ["num_hidden_layers"], least=1)
        shape["rope_parameters"] = reader.rope()
        reader.window(n_layers)
        # hidden_size / heads in some configs, while the weights were trained with another.
        reader.take("head_dim")
        declared = reader.take("draft_vocab_size", "truncated_vocab_size")
        named = _named_layers(reader, fields.get("form") == "DeepSpec")
        reader.refuse_unread()
        reader.whole(shape, _NUMBERS, least=1)
        own_head = "lm_head.weight" in weights
        if not own_head and declared not in (None, shape["vocab_size"]):
            reader.refuse("tensor lm_head.weight is missing")
        matrices = ("fc.weight", "midlayer.self_attn.q_proj.weight")
        for key in (*matrices, *(["lm_head.weight"] if own_head else [])):
            if key not in weights:
                reader.refuse(f"tensor {key} is missing")
            if weights[key].dim() != 2:
                reader.refuse(f"tensor {key} has shape {list(weights[key].shape)}, a matrix is due")
        rows = weights["lm_head.weight"].shape[0] if own_head else shape["vocab_size"]
        if declared not in (None, rows):
            reader.refuse(f"draft_vocab_size={declared}, but lm_head.weight has {rows} rows")
        if not named:
            named = default_layers(depth, where)
            layers = ", ".join(map(str, named))
            log.warning("%s names no target layers: it is taken to read %s", where, layers)
        check_layers(named, depth, where)
        heads = shape["num_attention_heads"]
        shape["head_dim"] = weights["midlayer.self_attn.q_proj.weight"].shape[0] // heads
        return cls(
            LlamaConfig(**reader.layer_shape(shape), num_hidden_layers=n_layers),
            own_head=own_head,
            **fields,
            draft_vocab_size=rows,
            feature_width=weights["fc.weight"].shape[1],
            embeds="embed_tokens.weight" in weights,
            target_layer_ids=named,
        )

    def published(self) -> dict[str, Any]:
        """The config.json of the published form."""
        layer = self.layer.to_dict()
        keep = (*_NUMBERS, "head_dim", "rms_norm_eps", "max_position_embeddings")
        ids = list(self.target_layer_ids)
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{key: layer[key] for key in keep},
            "num_hidden_layers": self.layer.num_hidden_layers,
            "draft_vocab_size": self.draft_vocab_size,
            # Engines read the one or the other.
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": ids,
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": layer["rope_parameters"],
            "rope_theta": layer["rope_parameters"]["rope_theta"],
            "dtype": "bfloat16",
        }


def _named_layers(reader: ConfigReader, deepspec: bool) -> tuple[int, ...]:
    """Target layers that a config.json names in one way or several that agree; () for none."""
    found: dict[str, tuple[int, ...]] = {}
    of_outputs = (_NESTED, *(["target_layer_ids"] if deepspec else []))
    for key in (*of_outputs, *_TOP):
        value = reader.take(key)
        if value is not None:
            ids = reader.layer_ids(key, value)
            if key not in of_outputs and min(ids) == 0:
                reader.refuse(f"{key}={value}: 0 is the embeddings, not built; allowed are >= 1")
            found[key] = ids if key in of_outputs else tuple(i - 1 for i in ids)
    if len(set(found.values())) > 1:
        meanings = ", ".join(f"{key} means layers {list(ids)}" for key, ids in found.items())
        reader.refuse(f"{meanings}: make them agree")
    return next(iter(found.values()), ())


def default_layers(num_target_layers: int, where: str) -> tuple[int, ...]:
    """Target layers whose outputs enter layers 2, L // 2 and L - 3, what heads read usually.

    Raises UserError for a target that is too shallow for it.
    """
    if num_target_layers < 4:
        raise UserError(
            f"drafter {where}: a target of {num_target_layers} layers has no three for EAGLE-3 to "
            "read; it takes 4"
        )
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


_AUX_NORMS = ("aux_norm_low.", "aux_norm_mid.", "aux_norm_high.")  # fc_norm.0 to 2, once
_NOT_OURS = ("rotary_emb.inv_freq",)
_LATER_NORM = re.compile(r"layers\.\d+\.hidden_norm\.")


def head_tensors(weights: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors of a head under the names that the network has (UserError: one name twice).

    Converters call the first layer `layers.0` or `midlayer`; later ones stand behind it. Some call
    a later layer's input norm `hidden_norm`, as sglang reads it.
    """
    found: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        name = key.removeprefix("model.")
        if name.endswith(_NOT_OURS):
            continue
        if name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        for place, old in enumerate(_AUX_NORMS):
            if name.startswith(old):
                name = f"fc_norm.{place}." + name.removeprefix(old)
        if _LATER_NORM.match(name):
            name = name.replace("hidden_norm", "input_layernorm")
        if name in found:
            raise UserError(f"drafter {where}: two tensors are {name}, one of them {key}")
        found[name] = tensor
    return found
