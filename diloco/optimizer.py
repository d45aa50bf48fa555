"""DiLoCoOptimizer: any torch optimizer as a learner of a run, in one line."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from diloco import config
from diloco._errors import logger, name_list
from diloco._inner_state import is_initialising_call, reset_inner_state
from diloco._outer_state import OuterState
from diloco._saved import check, check_format, counters_only
from diloco._scaler import caller, refuse_second_division
from diloco._several import Several, inner_ones
from diloco.island import Ranks
from diloco.learner import Learner, _token_count, disconnected_stats
from diloco.parameters import Named, Parameter, added, notice_buffers, of_optimizer, repeatable

# Optimizers that are wrapped right now.
_wrapped: weakref.WeakKeyDictionary[Optimizer, weakref.ref[DiLoCoOptimizer]] = weakref.WeakKeyDictionary()


class DiLoCoOptimizer(Optimizer):
    """Wraps `optimizer`; use it in its place. Schedulers, GradScaler, closures, hooks, checkpoints work on it.

    Args:
        optimizer: the inner optimizer, made from parameters of `model`; or a list of them over different parameters,
            say Muon for matrices and AdamW for the rest, which then make one step together.
        model: gives the parameters their names; pairs of name and tensor will do.
        tokens: called once per step, returns the number of tokens the step trained on. Or call `add_tokens(n)` for
            every micro-batch. Without either each step counts as one token.
        settings: see `Learner`, and there for all other arguments.

    `param_groups`, `state` and `defaults` are the inner optimizer's own; of several, `param_groups` are those of all in
    order (the same dictionaries) and `defaults` the first one's. A scheduler may be made on the wrapper or on any inner
    optimizer. A copy (copy.deepcopy, pickle) is disconnected: it steps, but takes no part in the run. Global step hooks
    of torch run once per step, as the inner optimizer's.
    """

    _inner: Optimizer
    _learner: Learner | None
    _names: dict[int, str]
    _model: Named
    _tokens: Callable[[], int] | None

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        model: Named,
        syncer: str | None = None,
        *,
        learner_id: str | None = None,
        run_id: str | None = None,
        tokens: Callable[[], int] | None = None,
        ledger_dir: str | os.PathLike[str] | None = None,
        give_up_after_s: float = 0.0,
        join_timeout_s: float = 10.0,
        island: Ranks = None,
        **settings: config.SettingValue,
    ) -> None:
        self._wrap(
            optimizer,
            model,
            tokens,
            lambda model, parameters: Learner._of(
                model,
                parameters,
                syncer=syncer,
                learner_id=learner_id,
                run_id=run_id,
                ledger_dir=ledger_dir,
                give_up_after_s=give_up_after_s,
                join_timeout_s=join_timeout_s,
                island=island,
                settings=settings,
            ),
        )

    def _wrap(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        model: Named,
        tokens: Callable[[], int] | None,
        make_learner: Callable[[Named, list[Parameter]], Learner],
    ) -> None:
        optimizer = _checked_inner(optimizer)
        if tokens is not None and not callable(tokens):
            raise TypeError(f"tokens: expected a function that returns a step's number of tokens, got {tokens!r}")
        model = repeatable(model)
        parameters = of_optimizer(model, optimizer)
        notice_buffers(model)
        self._adopt_inner(optimizer)
        self._model = model
        self._tokens = tokens
        self._learner = make_learner(model, parameters)
        self._names = {id(parameter.tensor): parameter.name for parameter in parameters}
        me = weakref.ref(self)
        for one in inner_ones(optimizer):
            _wrapped[one] = me
            self._handles.append(one.register_step_post_hook(lambda *_: _was_stepped(me)))

    def _adopt_inner(self, optimizer: Optimizer) -> None:
        # Not Optimizer.__init__: groups and state of its own would part from the inner ones at the first load.
        self._inner = optimizer
        self._learner = None
        self._names = {}
        self._tokens = None
        self._pending_tokens = 0
        self._counts_tokens = False
        self._told_tokens = False
        self._alone: set[int] = set()  # trained and not synchronised
        self._handles: list[Any] = []  # of the hooks on the inner optimizers
        self._stepping = False
        self._stepped_directly = 0  # steps of an inner optimizer that did not come through here
        self._forgotten = False  # a state without an outer one was loaded
        self._earlier = {"steps": 0, "tokens": 0}  # of a copy: of its original
        Optimizer.__setstate__(self, {})

    # ---- the inner optimizer's, always ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        if not torch.compiler.is_compiling():
            refuse_second_division(caller(1), inner_ones(self._inner))
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    @property
    def inner(self) -> Optimizer:
        """The wrapped optimizer; of several, one that makes them step together."""
        return self._inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer. Its trainable parameters are synchronised once another learner has added
        the same ones (see Learner.add_parameters); they need a name, in the model or given with the group."""
        self._inner.add_param_group(param_group)
        if self._learner is not None:
            self._take_in(self._learner, self._inner.param_groups[-1]["params"])

    def _take_in(self, learner: Learner, tensors: list[torch.Tensor]) -> None:
        """Those of them that are trained from now on. A warning tells, once, how many cannot be synchronised."""
        new = [p for p in tensors if p.requires_grad and id(p) not in self._names and id(p) not in self._alone]
        if not new:
            return
        groups = self._inner.param_groups
        given = {
            id(p): name
            for group in groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        why = learner._cannot_grow()
        found = [] if why else added(self._model, new, given, learner._parameters)
        learner._add(found)
        self._names |= {id(parameter.tensor): parameter.name for parameter in found}
        alone = [p for p in new if id(p) not in self._names]
        self._alone |= {id(p) for p in alone}
        if alone:
            logger.warning(
                "[%s] %d parameter(s) that were added or unfrozen are trained by this process alone (%s); to "
                "synchronise them, close this optimizer and wrap the inner one again, everywhere",
                learner.learner_id,
                len(alone),
                why or "they have no name: make them part of the model before they are added; or they cannot travel",
            )

    # ---- stepping ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The inner optimizer's step, then the boundary: count, stage, adopt, report. Returns the closure's loss."""
        # Every line here runs with a cold cache, after a whole step of training: it costs ten times what it seems to.
        if self._learner is not None and self._learner.closed:
            self._refuse(self._learner)  # before the inner step: a refused step changes nothing
        if self._optimizer_step_pre_hooks:
            closure = self._run_pre_hooks(closure)
        inner = self._inner
        initialising = closure is None and not inner.state and is_initialising_call(inner.param_groups)
        self._stepping = True
        try:
            # Called with as few arguments as possible: not every optimizer outside torch takes a closure.
            loss = inner.step() if closure is None else inner.step(closure)
        finally:
            self._stepping = False
        if not initialising:
            self._boundary()
        if self._optimizer_step_post_hooks:
            for hook in self._optimizer_step_post_hooks.values():
                hook(self, (self,), {"closure": closure})
        return loss

    # torch would otherwise wrap step once more and run the global hooks a second time.
    step.hooked = True  # type: ignore[attr-defined]

    @staticmethod
    def _refuse(learner: Learner) -> NoReturn:
        learner._check_process()
        raise RuntimeError(
            "this DiLoCoOptimizer is closed; expected no step after close(). "
            "Go on with its inner optimizer (.inner), or wrap that again."
        )

    def _run_pre_hooks(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        for hook in self._optimizer_step_pre_hooks.values():
            changed = hook(self, (self,), {"closure": closure})
            if changed is not None:
                args, kwargs = changed
                closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        return closure

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _boundary(self) -> None:
        if self._learner is None:
            return
        if self._forgotten:
            self._say_fresh_window(self._learner)
        result = self._learner._step(self._take_tokens(), self._lr())
        if self._learner._came_round:
            self._look_at_groups(self._learner)
        if result.reset:
            reset_inner_state(self._inner, result.reset)
            logger.warning(
                "[%s] a contribution was refused because it was not finite; the global values are back and the inner "
                "optimizer's state is reset for %s",
                self._learner.learner_id,
                name_list(self._names[id(tensor)] for tensor in result.reset),
            )

    def _look_at_groups(self, learner: Learner) -> None:
        """What is synchronised must be what is trained. Not at every step: it walks over all parameters."""
        tensors = [p for group in self._inner.param_groups for p in group["params"]]
        trained = {id(p) for p in tensors}
        lost = [name for key, name in self._names.items() if key not in trained]
        if lost:
            raise ValueError(
                f"{len(lost)} synchronised parameter(s) are no longer in the optimizer ({name_list(lost)}); expected "
                "the same parameters all along. Make the optimizer from the model as it is now, and wrap it again"
            )
        self._take_in(learner, tensors)

    def _lr(self) -> float:
        """Of the first group, for the syncer to compare; 0 where an optimizer has none, or keeps it in a tensor on a
        device, which to read would wait for it."""
        lr = self._inner.param_groups[0].get("lr", 0.0)
        if isinstance(lr, torch.Tensor):
            return float(lr) if lr.device.type == "cpu" else 0.0
        return float(lr)

    def _take_tokens(self) -> int:
        if self._tokens is not None:
            return _token_count(self._tokens())
        if self._counts_tokens:
            tokens, self._pending_tokens = self._pending_tokens, 0
            return tokens
        if not self._told_tokens:
            self._told_tokens = True
            logger.warning(
                "neither tokens= nor add_tokens() is used: every step counts as one token, so learners with different "
                "batch sizes weigh the same"
            )
        return 1

    def add_tokens(self, n: int) -> None:
        """Counts `n` tokens (or samples) towards the next step. Those of a step that GradScaler skips move on."""
        self._counts_tokens = True
        self._pending_tokens += _token_count(n)

    # ---- the learner ----

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise RuntimeError(
                "this DiLoCoOptimizer is a copy and takes no part in a run; wrap an optimizer to join one"
            )
        return self._learner

    def stats(self) -> dict[str, Any]:
        """See Learner.stats(), and `stepped_directly`: steps of an inner optimizer that were not this one's."""
        stats = disconnected_stats(**self._earlier) if self._learner is None else self._learner.stats()
        return stats | {"stepped_directly": self._stepped_directly}

    def close(self, flush_s: float = 5.0) -> None:
        """Leaves the run: waits at most `flush_s` until what was sent has arrived. Idempotent. No step() after it."""
        if self._learner is not None:
            self._learner.close(flush_s)
            for handle in self._handles:
                handle.remove()
            for one in inner_ones(self._inner):
                _wrapped.pop(one, None)

    def __enter__(self) -> DiLoCoOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- saving, loading, copying ----

    def outer_state(self, *, full: bool = False) -> OuterState:
        """What is this wrapper's own, apart from the inner optimizer's: an object with state_dict() and
        load_state_dict(), which torch.distributed.checkpoint saves and loads beside the optimizer's state.

        All ranks of an island call them together; the same comes out on each. `full`: whole tensors on the CPU in place
        of DTensors, for one file that rank 0 writes."""
        return OuterState(self, full)

    def _outer_state_dict(self) -> dict[str, Any]:
        own = counters_only(**self._earlier) if self._learner is None else self._learner.state_dict()
        return own | {"pending_tokens": self._pending_tokens}

    def _outer_state_together(self, full: bool) -> dict[str, Any]:
        if self._learner is None:
            return self._outer_state_dict()
        return self._learner._state_together(self._pending_tokens, full)

    def _load_outer_state_dict(self, own: dict[str, Any]) -> None:
        first = True
        if self._learner is not None:
            self._learner.load_state_dict(own)
            first = self._learner.rank == 0
        else:
            check_format(own)
            self._earlier = {"steps": int(own["steps"]), "tokens": int(own["tokens"])}
        self._forgotten = False
        of_all = own.get("rank", 0) is None
        self._pending_tokens = int(own["pending_tokens"]) if first or not of_all else 0
        self._counts_tokens |= self._pending_tokens > 0

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and under "diloco" this wrapper's own (see Learner.state_dict). torch.load reads it
        with weights_only=True."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = dict(self._inner.state_dict())
        state["diloco"] = self._outer_state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() gave, or a plain state_dict of the inner optimizer. All ranks of an island load
        together."""
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        own = state_dict.pop("diloco", None)
        if self._learner is not None and (own is not None or self._learner._island is not None):
            check(self._learner, own)  # before anything is changed
        self._inner.load_state_dict(state_dict)
        if own is not None:
            self._load_outer_state_dict(own)
        elif self._learner is not None:
            self._forgotten = True  # unless outer_state() is loaded before the next step
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _say_fresh_window(self, learner: Learner) -> None:
        self._forgotten = False
        logger.warning(
            "[%s] the state_dict that was loaded has no 'diloco' entry: a fresh window starts from the global weights, "
            "and work that was not merged when it was saved is not put back",
            learner.learner_id,
        )

    def __getstate__(self) -> dict[str, Any]:
        stats = self.stats()
        return {
            "inner": self._inner,
            "earlier": {"steps": stats["total_steps"], "tokens": stats["total_tokens"]},
            "pending_tokens": self._pending_tokens,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "inner" not in state:
            Optimizer.__setstate__(self, state)
            return
        self._adopt_inner(state["inner"])
        self._earlier = dict(state["earlier"])
        self._pending_tokens = state["pending_tokens"]


def _was_stepped(wrapper: weakref.ref[DiLoCoOptimizer]) -> None:
    """A post hook of every inner optimizer."""
    opt = wrapper()
    if opt is None or opt._stepping or opt._learner is None or opt._learner.closed:
        return
    opt._stepped_directly += 1
    if opt._stepped_directly == 1:
        logger.warning(
            "[%s] the inner optimizer was stepped directly, not through its DiLoCoOptimizer: such steps are not "
            "counted, and nothing is sent or adopted at them. Give the DiLoCoOptimizer to whatever calls step()",
            opt._learner.learner_id,
        )


def _checked_inner(optimizer: Any) -> Optimizer:
    several = isinstance(optimizer, list | tuple)
    for one in optimizer if several else [optimizer]:
        _check_one(one)
    return Several(optimizer) if several else optimizer


def _check_one(optimizer: Any) -> None:
    if isinstance(optimizer, DiLoCoOptimizer):
        raise ValueError("expected a plain torch optimizer, got a DiLoCoOptimizer: this one is wrapped already")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    other = _wrapped.get(optimizer)
    holder = other() if other is not None else None
    if holder is not None:
        raise ValueError(
            f"this {type(optimizer).__name__} is wrapped already, by learner '{holder.learner.learner_id}'; "
            "use that DiLoCoOptimizer, or close() it first"
        )
