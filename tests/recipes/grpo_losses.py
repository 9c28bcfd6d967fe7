"""A loss of a user's own that does not look at the sampler's log-probabilities."""

from recipes.losses.policy import PolicyLoss


class Reinforce(PolicyLoss):
    """-A p."""

    def __init__(self, **options):
        super().__init__(**options)
        self.required_fields = ("advantages",)

    def term(self, p, o, advantages, tokens):
        return -advantages * p
