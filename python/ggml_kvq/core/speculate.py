"""Steps of SpeCache's generation (arXiv 2503.16163, section 3.3 and algorithm 3): every step decodes the token that was
sampled and a guess of the next one. The guess picks the far rows that the next step reads, and its answer is the guess
after it; its cell is removed again. Which text comes out does not depend on whether guesses were right, but on which
rows were there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ..errors import KvqError, MethodError
from .sampling import Chain
from .step import Step

if TYPE_CHECKING:
    from .model import Model


class GuessingStep(Step):
    """Two rows a step. The first call decodes a prompt alone; the second decodes its token alone once more, for a first
    guess (the paper's pre-decoding step). A step that raises leaves no guess in the cache.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.guess: int | None = None
        self.begun = False
        options = "".join(str(c.get("options", "")) for c in model.kv_stats().get("caches", []))
        if "fetch=ahead" not in options:
            raise MethodError(
                f"speculate=True picks rows for the next step, and the cache is {model.kv_method or 'upstream'}"
                f"{' with ' + options if options else ''}: use kv_method='specache' with kv_opts='fetch=ahead'"
            )
        if model.n_batch < 2:
            raise MethodError(
                f"speculate=True decodes a token and a guess at once, and n_batch={model.n_batch}: pass n_batch=2 or"
                " more"
            )

    def _best(self, ids: list[int], outputs: list[bool]) -> int:
        logits = next(iter(self.model.feed(ids, outputs=outputs)))
        return int(np.argmax(logits[-1]))

    def _forget_last(self) -> None:
        self.model.truncate(len(self.model.tokens) - 1)

    def next(self, ids: list[int], chain: Chain) -> int:
        model = self.model
        if not self.begun or len(ids) != 1 or len(model.tokens) + 2 > model.n_ctx:
            self.begun = True
            return super().next(ids, chain)
        n_sampled = len(model.tokens) + len(ids)
        try:
            if self.guess is None:
                self.guess = self._best(ids, [True])
                self._forget_last()
            following = self._best([*ids, self.guess], [True, True])
            token = chain.sample(model.context, 0)
            self._forget_last()
        except BaseException:  # Ctrl-C too: what goes on from here would go on from a guess
            with suppress(KvqError):  # a model that was closed holds nothing
                model.truncate(min(len(model.tokens), n_sampled))
            raise
        self.guess = following
        return token
