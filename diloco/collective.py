"""Classic and Streaming DiLoCo inside one torchrun job, without a syncer: docs/collective.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from diloco import _exit, _process_groups, config
from diloco._errors import logger
from diloco._late_load import warn_of_late_loads
from diloco._native import _C
from diloco._process_groups import Group
from diloco._saved import check_format, counters_only
from diloco._sharded import is_sharded
from diloco.learner import Learner, _trainable
from diloco.optimizer import DiLoCoOptimizer
from diloco.parameters import Named, Parameter, repeatable

_ARGUMENTS = ("group", "backend", "tokens")


class CollectiveLearner(Learner):
    """One rank of a run without a syncer: the ranks of a process group are the learners and merge among themselves.

    Args:
        named_parameters: the model, or pairs of name and tensor. Trainable floating-point and complex tensors take
            part, complex ones as their real view.
        group: a ProcessGroup, or one dimension of a DeviceMesh (`mesh["replicate"]`); default: all ranks of the job.
        backend: "gloo" or "nccl", for a new group of all ranks; without it the group's own.
        settings: names of the settings table, the same on every rank; default DILOCO_<NAME>, then the preset, then
            the table. `mode` is lockstep. Settings that only a syncer reads are refused.

    The constructor returns when all ranks have called it and agree; they then have rank 0's weights. Every rank must
    make the same number of steps. Raises ValueError (on all ranks, where they disagree), TypeError (unknown option),
    ConnectionError (a rank has died, or the group's timeout is over): nothing goes on after that. Training thread only.
    """

    _native: _C.CollectiveLearner

    def __init__(
        self,
        named_parameters: Named,
        group: Group | None = None,
        *,
        backend: str | None = None,
        **settings: config.SettingValue,
    ) -> None:
        named_parameters = repeatable(named_parameters)
        self._meet(named_parameters, _trainable(named_parameters), group, backend, settings)

    @classmethod
    def _among(
        cls,
        model: Named,
        parameters: list[Parameter],
        group: Group | None,
        backend: str | None,
        settings: dict[str, config.SettingValue],
    ) -> CollectiveLearner:
        learner = cls.__new__(cls)
        learner._meet(model, parameters, group, backend, settings)
        return learner

    def _meet(
        self,
        model: Named,
        parameters: list[Parameter],
        group: Group | None,
        backend: str | None,
        settings: dict[str, config.SettingValue],
    ) -> None:
        texts = config.environment_settings() | config.setting_texts(settings, "a collective learner", _ARGUMENTS)
        data = _process_groups.of_learners(group, backend)
        on_device = _process_groups.merges_on_device(data, [p.tensor for p in parameters])
        self._connect(model, parameters, data, _process_groups.control_of(data), on_device, texts)
        warn_of_late_loads(model, self)

    def _connect(
        self,
        model: Named,
        parameters: list[Parameter],
        group: ProcessGroup,
        control: ProcessGroup,
        on_device: bool,
        settings: dict[str, str],
    ) -> None:
        self._began = start = time.perf_counter()
        for parameter in parameters:
            if is_sharded(parameter.tensor):
                raise ValueError(
                    f"parameter '{parameter.name}' is sharded over several processes; expected a whole copy of the "
                    "model on every rank. A sharded model can be an island of a run with a syncer (docs/islands.md)"
                )
        self._prepare(model, parameters)
        self.rank, self.ranks = group.rank(), group.size()
        self.learner_id = f"rank-{self.rank}"
        self._native = _C.CollectiveLearner(
            parameters=[(p.name, p.real, p.aliases) for p in parameters],
            group=group,
            control=control,
            settings=settings,
            on_device=on_device,
        )
        self._c = self._native  # type: ignore[assignment]  # what Learner's methods call is there too
        _exit.close_learner_at_exit(self)
        self._joining_s = self._catching_up_s = time.perf_counter() - start
        self._account(self._joining_s)
        self._write_log()
        logger.info("[%s] %s", self.learner_id, self._native.describe())

    def stats(self) -> dict[str, Any]:
        """The rank's account: state, steps, tokens, merges, versions, bytes, and time spent in here and waiting."""
        return {"learner_id": self.learner_id, "rank": self.rank, "ranks": self.ranks, **self._counts()}

    def _cannot_grow(self) -> str:
        return "in collective mode the ranks cannot add parameters"

    def _waited_s(self, stats: dict[str, Any]) -> float:
        return float(stats["waited_s"])

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint: global weights, outer optimizer, versions and counters, which are equal on
        all ranks, and this rank's parameters and contributions under way. Local. Read it, do not write into it."""
        state = self._native.save()
        state["local"] = {p.name: p.tensor.detach().clone() for p in self._parameters}
        stats = self.stats()
        return counters_only(stats["total_steps"], stats["total_tokens"]) | {"collective": state}

    def _state_together(self, pending_tokens: int, full: bool) -> dict[str, Any]:
        return self.state_dict() | {"pending_tokens": pending_tokens}  # nothing of it is sharded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """All ranks at the same time, each with what it saved at the same step; the run then goes on as if it had never
        stopped. On another number of ranks, or with another rank's state, it goes on from the global weights, and work
        that was not merged yet is dropped. ValueError, on all ranks, if the states are not of one step."""
        check_format(state_dict)
        if "collective" not in state_dict:
            raise ValueError(
                "this state was not saved by a learner without a syncer and has no global weights; "
                "leave it out (of an optimizer's state_dict its 'diloco' entry), on every rank"
            )
        state = state_dict["collective"]
        exact = self._native.load(state)
        now = self._native.stats()
        self._before.steps = int(state_dict["steps"]) - now["steps"]
        self._before.tokens = int(state_dict["tokens"]) - now["tokens"]
        self._write_log()
        if not exact:
            logger.warning(
                "[%s] the state of rank %d of %d is loaded on rank %d of %d: training goes on from the global weights "
                "of step %d; work that was not merged then is dropped",
                self.learner_id,
                state["rank"],
                state["ranks"],
                self.rank,
                self.ranks,
                state["clock"],
            )
            return
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.tensor.copy_(state["local"][parameter.name])

    def __repr__(self) -> str:
        return f"<diloco.CollectiveLearner rank {self.rank} of {self.ranks}>"


class CollectiveDiLoCoOptimizer(DiLoCoOptimizer):
    """DiLoCoOptimizer without a syncer: wraps `optimizer`, and the ranks of one torchrun job are the learners.

    Args:
        optimizer, model, tokens: see DiLoCoOptimizer.
        group, backend, settings: see CollectiveLearner.

    Unlike DiLoCoOptimizer it waits: at fixed steps, for all ranks. `state_dict()` holds the global weights, the outer
    optimizer and this rank's parameters too; every rank saves its own, and load_state_dict is called by all ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        model: Named,
        group: Group | None = None,
        *,
        backend: str | None = None,
        tokens: Callable[[], int] | None = None,
        **settings: config.SettingValue,
    ) -> None:
        self._wrap(
            optimizer,
            model,
            tokens,
            lambda model, parameters: CollectiveLearner._among(model, parameters, group, backend, settings),
        )

    @property
    def learner(self) -> CollectiveLearner:
        return cast(CollectiveLearner, super().learner)
