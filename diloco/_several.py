"""Several torch optimizers over disjoint parameters as one: Muon for the matrices and AdamW for the rest, say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from diloco._errors import describe_tensor


class _States(MutableMapping[Tensor, Any]):
    """The state of every optimizer, by parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, parameter: Tensor) -> Any:
        for optimizer in self._optimizers:
            if any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                return optimizer.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._of(parameter)[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


class Several(Optimizer):
    """`param_groups` are those of all, one after the other, the same dictionaries; so is the state_dict, which reads
    like that of one optimizer with all groups. One step() steps each once, in order; a closure is called once, before.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        _check(optimizers)
        self._optimizers = list(optimizers)
        Optimizer.__setstate__(self, {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return _States(self._optimizers)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._optimizers[0].defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        names = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        raise ValueError(f"add_param_group: expected one of the optimizers ({names}), got all of them; call its own")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's global hooks run for each optimizer, not once more

    def state_dict(self) -> dict[str, Any]:
        """Of one optimizer with all groups: parameters are numbered through."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for optimizer in self._optimizers:
            part = optimizer.state_dict()
            state |= {first + number: value for number, value in part["state"].items()}
            groups += [group | {"params": [first + n for n in group["params"]]} for group in part["param_groups"]]
            first += sum(len(group["params"]) for group in part["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        wanted = [len(optimizer.param_groups) for optimizer in self._optimizers]
        if len(groups) != sum(wanted):
            raise ValueError(
                f"expected the state of {len(wanted)} optimizers with {sum(wanted)} parameter groups, got "
                f"{len(groups)} groups; load it into the same optimizers in the same order"
            )
        for optimizer, count in zip(self._optimizers, wanted, strict=True):
            own, groups = groups[:count], groups[count:]
            numbers = {n for group in own for n in group["params"]}
            state = {n: value for n, value in state_dict["state"].items() if n in numbers}
            optimizer.load_state_dict({"state": state, "param_groups": own})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self._optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._optimizers = state["optimizers"]
        Optimizer.__setstate__(self, {})


def inner_ones(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that a user made."""
    return optimizer._optimizers if isinstance(optimizer, Several) else [optimizer]


def _check(optimizers: Sequence[Optimizer]) -> None:
    if not optimizers:
        raise ValueError("expected one or more optimizers, got none")
    holder: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS calls its closure several times in a step and cannot be one of several optimizers")
        for tensor in (p for group in optimizer.param_groups for p in group["params"]):
            if id(tensor) in holder:
                raise ValueError(
                    f"a parameter ({describe_tensor(tensor)}) belongs to {type(holder[id(tensor)]).__name__} and to "
                    f"{type(optimizer).__name__}; expected optimizers over different parameters"
                )
            holder[id(tensor)] = optimizer
