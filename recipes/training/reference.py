"""The frozen reference of a run: the model as it began, or the base under its adapters."""

import copy
from contextlib import nullcontext
from typing import Any

from peft import PeftModel

from recipes.losses.logprobs import TokenScores
from recipes.models.build import LanguageModel
from recipes.training.checkpoint import frozen_fingerprint

__all__ = ["Reference"]


class Reference:
    """Scores tokens as the policy did before training.

    A model that is trained as a whole is copied. Under LoRA the base does not move, so nothing is copied: adapters are
    turned off while the reference scores.

    Args:
        language_model: The policy, before any update and before a checkpoint is loaded.

    Attributes:
        fingerprint: Hash of the copy's weights; None where nothing is copied.
    """

    def __init__(self, language_model: LanguageModel):
        self.policy = language_model.scoring
        self.is_base = isinstance(language_model.model, PeftModel)
        self.fingerprint: str | None = None
        if self.is_base:
            self.scoring = self.policy
            return
        self.scoring = copy.deepcopy(self.policy).eval()
        self.scoring.requires_grad_(False)
        self.fingerprint = frozen_fingerprint(self.scoring)

    def __call__(self, *arguments: Any, **options: Any) -> TokenScores:
        """As `ScoringModel.forward`."""
        model = self.policy.hf
        without_adapters = model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()
        with without_adapters:
            scores: TokenScores = self.scoring(*arguments, **options)
        return scores
