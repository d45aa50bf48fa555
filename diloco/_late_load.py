"""Says so when weights are loaded into a model whose learner is already in a run."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from diloco._errors import logger


class LateLoad:
    """A post-hook of load_state_dict. Copies of the model (deepcopy, pickle) get one that says nothing."""

    def __init__(self, learner: Any = None) -> None:
        self._learner = weakref.ref(learner) if learner is not None else None

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        learner = self._learner() if self._learner is not None else None
        if learner is None or learner.closed:
            return
        learner._watch.look_at_all()  # load_state_dict(assign=True) puts other objects into their place
        logger.warning(
            "[%s] weights were loaded into a model that is in a run: unless the learner's saved state is loaded next, "
            "their difference to the global weights counts as its work. Load the model first, then wrap the optimizer",
            learner.learner_id,
        )

    def __reduce__(self) -> tuple[type[LateLoad], tuple[()]]:
        return LateLoad, ()


def warn_of_late_loads(model: object, learner: Any) -> None:
    if isinstance(model, nn.Module):
        model.register_load_state_dict_post_hook(LateLoad(learner))  # type: ignore[no-untyped-call]
