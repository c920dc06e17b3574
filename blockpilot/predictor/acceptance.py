"""What copies and drafts may accept, said before they are verified.

Three fitted functions, linear in the features that their `*_features` list: the chance of each
token of a copy, the tokens that a draft brings before it is made, and the chance of a candidate of
a drafted slot, given that its parent is right. They hold no times: those are the machine's.

Letters: S slots, K candidates of a slot.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.json_values import fitted

FILE = "acceptance.json"
COPY_FEATURES = 12
DRAFT_FEATURES = 7
NODE_FEATURES = 7

_LEAST, _MOST = 1e-4, 1 - 1e-4  # chances that are told apart


@dataclass(frozen=True)
class Situation:
    """What is known of an answer before a cycle drafts."""

    match: int  # tokens of the text's ending that occurred before; 0: nothing to copy
    several: bool  # it occurred more than once
    agreed: bool  # and the same token followed the last two times
    quoted: bool  # what would be copied stands in the prompt
    hits: float  # tokens of late that a copy would have had right
    misses: float  # copies of late that would have ended in a wrong token
    drafted: float  # tokens that drafts of late had accepted
    temperature: float


@dataclass(frozen=True)
class AcceptanceModel:
    """Weights of the three functions, and the pair that they were fitted to."""

    copy: list[float]
    draft: list[float]
    node: list[float]
    mean_drafted: float  # accepted tokens of a draft, over all prompts
    fitted_to: dict[str, Any]

    def copy_chances(self, situation: Situation, n_tokens: int) -> list[float]:
        """Chance of each of `n_tokens` copied tokens, given that those before it are right."""
        return [
            logistic(dot(self.copy, copy_features(situation, place)))
            for place in range(1, n_tokens + 1)
        ]

    def expected_draft(self, situation: Situation) -> float:
        """Accepted tokens that a drafted tree promises, before it is made."""
        return max(0.0, dot(self.draft, draft_features(situation)))

    def merged_chance(self, chance: float, copied: bool, copy_chance: float, slot: int) -> float:
        """Chance of a candidate where a copy has something to say: see `node_features`."""
        return logistic(dot(self.node, node_features(chance, copied, copy_chance, slot)))

    def digest(self) -> str:
        """Twelve hex digits that change with the model."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Text of its file."""
        return json.dumps(asdict(self), indent=1) + "\n"


def copy_features(situation: Situation, place: int) -> list[float]:
    """Of the copied token at `place`, 1 for the first: behind it the match is longer."""
    length = math.log2(min(32, situation.match + place - 1))
    hot = min(1.0, situation.temperature)
    first = float(place == 1)
    trust = log_odds(situation.hits / (situation.hits + situation.misses))
    return [
        1.0,
        length,
        length * length,
        trust,
        trust * length,
        hot,
        hot * length,
        first,
        first * length,
        first * situation.several,
        first * (situation.several and situation.agreed),
        float(situation.quoted),
    ]


def draft_features(situation: Situation) -> list[float]:
    """Of a draft that is not made yet."""
    trust = log_odds(situation.hits / (situation.hits + situation.misses))
    hot = min(1.0, situation.temperature)
    return [
        1.0,
        situation.drafted,
        hot,
        hot * situation.drafted,
        math.log2(1 + situation.match),
        trust,
        math.log2(1 + situation.match) * trust,
    ]


def node_features(chance: float, copied: bool, copy_chance: float, slot: int) -> list[float]:
    """Of a candidate of a slot, 0 for the first, behind a parent that is right and the copy's.

    `chance` is the drafter's own, `copy_chance` that of the copied token; `copied` says that the
    candidate is that token.
    """
    odds, trust = log_odds(chance), log_odds(copy_chance)
    return [
        1.0,
        odds,
        float(slot > 0),
        float(copied),
        odds if copied else 0.0,
        trust if copied else 0.0,
        0.0 if copied else trust,
    ]


def log_odds(chance: float) -> float:
    """log(p / (1 - p)) of a chance, held off 0 and 1."""
    chance = min(_MOST, max(_LEAST, chance))
    return math.log(chance / (1 - chance))


def logistic(odds: float) -> float:
    """The chance of log-odds."""
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, odds))))


def dot(weights: Sequence[float], features: Sequence[float]) -> float:
    """Sum of products."""
    return sum(weight * feature for weight, feature in zip(weights, features, strict=True))


def unfitted() -> AcceptanceModel:
    """Believes the drafter's own chances, and copies the more the longer they match."""
    copy = [0.0] * COPY_FEATURES
    copy[:2] = [-1.0, 1.0]
    draft = [0.0] * DRAFT_FEATURES
    draft[1] = 1.0
    node = [0.0] * NODE_FEATURES
    node[1] = 1.0
    return AcceptanceModel(copy, draft, node, 1.0, {})


def save_acceptance(model: AcceptanceModel, folder: Path) -> None:
    """Write a model into a folder, atomically."""
    make_folder(folder)
    replace_file(folder / FILE, lambda stream: stream.write(model.to_json().encode()))


def load_acceptance(path: str | Path) -> AcceptanceModel:
    """The model in a folder (UserError where there is none or it is damaged)."""
    file = Path(path) / FILE
    try:
        model = fitted(AcceptanceModel, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"policy.path={path}: no acceptance model ({error}); fit one with "
            "python -m blockpilot.train"
        ) from error
    for name, wanted in (
        ("copy", COPY_FEATURES),
        ("draft", DRAFT_FEATURES),
        ("node", NODE_FEATURES),
    ):
        if len(getattr(model, name)) != wanted:
            raise UserError(f"{file}: {name} has {len(getattr(model, name))} weights, not {wanted}")
    return model
