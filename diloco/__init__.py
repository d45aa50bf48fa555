"""Decoupled DiLoCo for PyTorch: learners that never wait, merged by a small native syncer.

Use in training code::

    opt = diloco.DiLoCoOptimizer(optimizer, model, syncer="127.0.0.1:29400")
"""

from diloco import logs
from diloco._native import __version__
from diloco.collective import CollectiveDiLoCoOptimizer, CollectiveLearner
from diloco.explain import Explanation, explain
from diloco.learner import Learner, StepResult
from diloco.optimizer import DiLoCoOptimizer
from diloco.parameters import shard_seed
from diloco.sigterm import leave_on_sigterm
from diloco.status import status
from diloco.syncer import Syncer

__all__ = [
    "CollectiveDiLoCoOptimizer",
    "CollectiveLearner",
    "DiLoCoOptimizer",
    "Explanation",
    "Learner",
    "StepResult",
    "Syncer",
    "__version__",
    "explain",
    "leave_on_sigterm",
    "logs",
    "shard_seed",
    "status",
]
