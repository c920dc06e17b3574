"""config.json of a block drafter in every published form, read into one description of a network.

Forms that share z-lab's keys (nested `dflash_config`, older `draft_config`, or flat): DFlash,
DFlash2, JetSpec, Domino, SpecForge's dspark and DeepSpec's flat ones; and speculators' dflash,
dflash2 and dspark, which nest the layers instead.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config

from blockpilot.drafters.forms.config import ConfigReader, check_layers
from blockpilot.drafters.forms.speculators import lifted

_SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_NUMBERS = (*_SHAPE_KEYS, "vocab_size")
_FULL, _SLIDING = "full_attention", "sliding_attention"

# Keys of relatives that no form here has at another value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "causal": (False,),
    "use_swa": (False,),
    "swa_window_size": (),
    "attention_sink_bias": (False,),
    "parallel_drafting": (False,),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "markov_rank": (0,),
    "projector_type": (),
}
_DOMINO = ("domino", "causal_v5")  # the second is its old name


@dataclass(frozen=True)
class Sight:
    """What the slots of one layer see: all of the block and its context, unless less is said.

    `window` W hides what lies W positions or more away, of a slot or, with `from_anchor`, the
    context more than W before the anchor. `causal` hides later slots.
    """

    window: int | None = None
    causal: bool = False
    from_anchor: bool = False


@dataclass(frozen=True)
class PathShape:
    """A part that scores a slot by the token chosen before it, and in which way.

    `kind`: selector (DFlash2), vanilla, gated or rnn (DSpark's Markov heads), domino.
    """

    kind: str
    rank: int
    top_k: int = 0  # candidates that a selector scores
    state: int = 0  # width of Domino's recurrent state
    skipped: int = 0  # first drafts that Domino leaves as they are


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter's identity: the shape of its layers and what it reads from which target.

    `block_size` counts the slots of a trained block as it enters the network. With `shift` slot j
    predicts the token one place behind its own, so all of them draft; without, the anchor's slot
    drafts nothing. What the fields below `num_target_layers` say is z-lab's plain form by default.
    """

    layers: Qwen3Config
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None  # None: the file does not say
    embedding_scale: float = 1.0  # times the rows of the target's embedding
    form: str = "z-lab"
    shift: bool = False
    sights: tuple[Sight, ...] = ()  # of each layer; (): all see everything
    output_multiplier: float | None = None  # of the LM head's output; None: as the target does it
    final_logit_softcapping: float | None = None  # of that, with an output_multiplier
    convolution: tuple[int, int] | None = None  # taps and channels that share their weights
    path: PathShape | None = None
    embeds: bool = False  # an embedding of its own
    draft_vocab_size: int | None = None  # rows of an LM head of its own; None: the target's

    @classmethod
    def parse(
        cls,
        raw: Mapping[str, Any],
        where: str,
        ignored: Sequence[str] = (),
        tensors: Collection[str] = (),
    ) -> DFlashConfig:
        """From a published config.json.

        `ignored` are keys that count as absent, `tensors` the names of the file's tensors, which
        say whether it has an embedding and a head of its own. Raises UserError with the key that
        is missing, out of range, or of a network that is not built.
        """
        if "speculators_model_type" in raw:
            return _speculators(lifted(raw, where), where, ignored, tensors)
        return _z_lab(raw, where, ignored)

    @property
    def trained_slots(self) -> int:
        """Slots that a cycle verifies at the trained size, anchor included."""
        return self.block_size + self.shift

    @property
    def plain(self) -> bool:
        """Whether this is z-lab's plain network, which is trained and saved here."""
        return self.identity() == self.published()

    def published(self) -> dict[str, Any]:
        """The config.json of z-lab's form, as far as it can say what this network is."""
        layers = self.layers.to_dict()
        keep = (*_SHAPE_KEYS, "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings")
        own: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.embedding_scale != 1:
            own["input_embedding_scale"] = self.embedding_scale
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **{key: layers[key] for key in keep},
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": layers["rope_parameters"],
            "rope_theta": layers["rope_parameters"]["rope_theta"],
            "dtype": "bfloat16",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": own,
        }

    def identity(self) -> dict[str, Any]:
        """All that decides drafts beside the weights: `published` and what it cannot say."""
        said = ("layers", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
        values = dataclasses.asdict(dataclasses.replace(self, layers=None))
        return self.published() | {
            field.name: values[field.name]
            for field in dataclasses.fields(self)
            if field.name not in (*said, "embedding_scale")
            and getattr(self, field.name) != field.default
        }


def _places(key: str) -> tuple[str, ...]:
    return f"dflash_config.{key}", f"draft_config.{key}", key


def _z_lab(raw: Mapping[str, Any], where: str, ignored: Sequence[str]) -> DFlashConfig:
    """The forms with z-lab's keys, told apart by `architectures` and `projector_type`."""
    reader = ConfigReader(raw, where, ignored)
    form = _form(reader)
    reader.expect("model_type", "qwen3")
    fields: dict[str, Any] = {"form": form}
    causal = None
    if form != "DeepSpec":
        causal = reader.flag("is_causal")
        if reader.flag(*_places("causal_head")):
            fields["form"] = "JetSpec"
            if causal is False:
                reader.refuse("config.json says causal_head=True, but is_causal=False")
            causal = True
        scale, cap = (
            reader.take(*_places(key)) for key in ("output_multiplier", "final_logit_softcapping")
        )
        if scale is not None or cap is not None:
            fields["output_multiplier"] = reader.positive("output_multiplier", scale, 1.0)
            fields["final_logit_softcapping"] = reader.positive("final_logit_softcapping", cap)
        given = reader.take(*_places("input_embedding_scale"))
        fields["embedding_scale"] = reader.positive("input_embedding_scale", given, 1.0)
        reader.expect(_places("target_hidden_size"), reader.peek("hidden_size"))
    if form == "DFlash2":
        fields |= _dflash2(reader, _places, reader.peek("vocab_size"))
    elif form == "Domino":
        fields |= _domino(reader)
    elif form in ("DeepSpec", "SpecForge dspark"):
        fields |= {"shift": True, "path": _markov(reader, _places, needed=form == "DeepSpec")}
        reader.expect(_places("sample_from_anchor"), True)
        reader.expect(_places("attention_mode"), "gqa", "mha")  # as its heads are
    for key, built in _NEUTRAL.items():
        reader.expect(_places(key), *built)
    fields |= _shape(reader, where, _places)
    fields["sights"] = _sights(
        reader, fields["layers"].num_hidden_layers, causal, draws=form == "DeepSpec"
    )
    if form == "DeepSpec":
        fields |= {"embeds": True, "draft_vocab_size": fields["layers"].vocab_size}
    reader.refuse_unread()
    return DFlashConfig(**fields)


def _form(reader: ConfigReader) -> str:
    """Which of the forms with z-lab's keys a file has; what says so is taken."""
    name, projector = "architectures", "dflash_config.projector_type"
    architecture = reader.peek(name)
    for form, own in (("DFlash2", ["DFlash2DraftModel"]), ("DeepSpec", ["Qwen3DSparkModel"])):
        if architecture == own:
            reader.take(name)
            return form
    if reader.peek(projector) in _DOMINO:
        reader.take(projector)
        reader.expect(name, ["DominoDraftModel"], ["DFlashDraftModel"])
        return "Domino"
    reader.expect(name, ["DFlashDraftModel"])
    if reader.peek(projector) != "dspark":
        return "z-lab"
    reader.take(projector)
    return "SpecForge dspark"


def _speculators(
    raw: Mapping[str, Any], where: str, ignored: Sequence[str], tensors: Collection[str]
) -> DFlashConfig:
    """speculators' dflash, dflash2 and dspark, with the layers' keys lifted to the top."""
    reader = ConfigReader(raw, where, ignored)
    kind = reader.take("speculators_model_type")
    if kind not in ("dflash", "dflash2", "dspark"):
        reader.refuse(
            f"speculators_model_type={kind} is no block drafter; allowed are dflash, dflash2, "
            "dspark (eagle3: drafter=eagle3)"
        )
    reader.take("architectures")  # which varies within a kind
    reader.expect("model_type", "qwen3", "llama")  # its layers are Qwen3's either way

    def flat(key: str) -> tuple[str, ...]:
        return (key,)

    fields: dict[str, Any] = {"form": f"speculators {kind}"}
    shift = reader.flag("sample_from_anchor")
    fields["shift"] = kind == "dspark" if shift is None else shift
    if kind == "dflash2":
        fields |= _dflash2(reader, flat, reader.peek("vocab_size"), (2, 16, 256, 16))
    elif kind == "dspark":
        path = fields["path"] = _markov(reader, flat, needed=False)
        if path is not None and path.kind == "rnn" and not fields["shift"]:
            # Its state would begin at a slot that drafts nothing.
            reader.refuse("markov_head_type=rnn needs sample_from_anchor=true")
    both_ways = reader.flag("sliding_window_non_causal")
    causal = not (kind == "dflash2" if both_ways is None else both_ways)
    above = reader.take("aux_hidden_state_layer_ids")
    ids = tuple(i - 1 for i in reader.layer_ids("aux_hidden_state_layer_ids", above))
    fields |= _shape(reader, where, flat, ids)
    layers = fields["layers"]
    windows = _windows(reader, layers.num_hidden_layers)
    fields["sights"] = tuple(
        Sight(window, causal, from_anchor=True) if window is not None else Sight()
        for window in windows
    )
    reader.expect("target_hidden_size", layers.hidden_size)
    rows = reader.take("draft_vocab_size")
    reader.whole({"draft_vocab_size": rows}, ["draft_vocab_size"] if rows else [], least=1)
    fields["embeds"] = "embed_tokens.weight" in tensors
    if "lm_head.weight" in tensors:
        fields["draft_vocab_size"] = rows or layers.vocab_size
    elif rows not in (None, layers.vocab_size):
        reader.refuse(f"draft_vocab_size={rows}, but there is no tensor lm_head.weight")
    reader.refuse_unread()
    if not any(window is not None for window in windows):
        fields["sights"] = ()
    return DFlashConfig(**fields)


def _shape(
    reader: ConfigReader, where: str, places: Any, ids: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Layers, block and target, which every form has."""
    keys = (*_NUMBERS, "head_dim", "rms_norm_eps", "max_position_embeddings")
    shape = {key: reader.take(key) for key in keys}
    shape["rope_parameters"] = reader.rope()
    own = {key: reader.take(*places(key)) for key in ("block_size", "mask_token_id")}
    depth = reader.take("num_target_layers")
    if ids is None:
        ids = reader.layer_ids("target_layer_ids", reader.take(*places("target_layer_ids")))
        reader.whole({"num_target_layers": depth}, ["num_target_layers"], least=1)
    reader.whole(shape, _NUMBERS, least=1)
    reader.whole(own, ["block_size"], least=2)
    reader.whole(own, ["mask_token_id"], least=None)  # the embedding's rows bound it
    if "rope_theta" not in shape["rope_parameters"]:
        reader.refuse("config.json lacks the key rope_theta")
    if any(b <= a for a, b in itertools.pairwise(ids)):
        reader.refuse(f"target_layer_ids={list(ids)} must be increasing")
    if depth is not None:
        check_layers(ids, depth, where)
    layers = Qwen3Config(**reader.layer_shape(shape))
    return {"layers": layers, "target_layer_ids": ids, "num_target_layers": depth, **own}


def _windows(reader: ConfigReader, n_layers: int) -> list[int | None]:
    """The window of each layer, None where it has none."""
    kinds = reader.take("layer_types") or [_FULL] * n_layers
    uses = reader.flag("use_sliding_window")
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        reader.refuse(f"layer_types={kinds} must name {n_layers} layers")
    if unknown := [each for each in kinds if each not in (_FULL, _SLIDING)]:
        reader.refuse(
            f"config.json says layer_types={unknown[0]}, allowed are {_FULL} and {_SLIDING}"
        )
    width = reader.take("sliding_window")
    if _SLIDING not in kinds:
        if uses and width is not None:
            reader.refuse("config.json says use_sliding_window=True, but layer_types has no window")
        return [None] * n_layers
    if uses is False:
        reader.refuse(f"config.json says use_sliding_window=False, but layer_types has {_SLIDING}")
    reader.whole({"sliding_window": width}, ["sliding_window"], least=1)
    return [width if kind == _SLIDING else None for kind in kinds]


def _sights(
    reader: ConfigReader, n_layers: int, causal: bool | None, *, draws: bool
) -> tuple[Sight, ...]:
    """z-lab's reading: sliding layers are causal unless `is_causal` says how all layers are."""
    windows = _windows(reader, n_layers)
    sights = tuple(
        Sight(window, (window is not None and not draws) if causal is None else causal)
        for window in windows
    )
    return () if sights == (Sight(),) * n_layers else sights


def _dflash2(
    reader: ConfigReader, places: Any, vocab_size: Any, default: Sequence[int | None] = (None,) * 4
) -> dict[str, Any]:
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    found = {key: reader.take(*places(key)) for key in keys}
    found = {
        key: usual if found[key] is None else found[key]
        for key, usual in zip(keys, default, strict=True)
    }
    reader.whole(found, keys, least=1)
    reader.expect(places("selector_vocab_size"), vocab_size)
    path = PathShape("selector", found["selector_rank"], top_k=found["selector_top_k"])
    return {"convolution": (found["conv_kernel_size"], found["conv_group_size"]), "path": path}


def _domino(reader: ConfigReader) -> dict[str, Any]:
    keys = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
    found = {key: reader.take(*_places(key)) for key in keys}
    found["pure_draft_prefix_len"] = found["pure_draft_prefix_len"] or 0
    reader.whole(found, keys[:2], least=1)
    reader.whole(found, keys[2:], least=0)
    path = PathShape(
        "domino",
        found["emb_dim"],
        state=found["gru_hidden_dim"],
        skipped=found["pure_draft_prefix_len"],
    )
    return {"path": path, "shift": bool(reader.flag(*_places("shift_label")))}


def _markov(reader: ConfigReader, places: Any, *, needed: bool) -> PathShape | None:
    """DSpark's Markov head, None at rank 0. Its confidence head cuts drafts, which here policies
    do: the keys that describe it decide nothing.
    """
    rank, kind = (reader.take(*places(key)) for key in ("markov_rank", "markov_head_type"))
    for key in ("enable_confidence_head", "confidence_head_with_markov", "num_anchors"):
        reader.take(*places(key))
    if not needed:
        rank = 0 if rank is None else rank
    reader.whole({"markov_rank": rank}, ["markov_rank"], least=0)
    if not rank:
        return None
    kind = kind or "vanilla"
    if kind not in ("vanilla", "gated", "rnn"):
        reader.refuse(f"markov_head_type={kind}, allowed are vanilla, gated and rnn")
    return PathShape(kind, rank)
