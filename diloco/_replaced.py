"""Notices when a model's parameters are no longer the objects that were handed over (sharded, converted, assigned)."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NoReturn

from torch import nn

from diloco.parameters import Named, Parameter

_AT_ONCE = 4


class Watch:
    """Every step looks at a few places of the model, in turn: what replaces parameters replaces all of them, so it is
    seen at the next step. After an adoption, and when the model has been loaded, all places are looked at.
    """

    def __init__(self, model: Named, parameters: list[Parameter]) -> None:
        self._places: list[tuple[MutableMapping[str, Any], str, object]] = []
        self._names: list[str] = []
        self._next = 0
        if isinstance(model, nn.Module):
            self._remember(model, {id(parameter.tensor): parameter.name for parameter in parameters})

    def _remember(self, model: nn.Module, names: dict[int, str]) -> None:
        for module in model.modules():
            for key, tensor in module._parameters.items():
                if id(tensor) in names:
                    self._add(module._parameters, key, tensor, f"parameter '{names[id(tensor)]}'")
        # A module above a parameter may be replaced as a whole.
        for path, module in model.named_modules():
            for key, child in module._modules.items():
                if child is not None and any(id(p) in names for p in child.parameters()):
                    self._add(module._modules, key, child, f"module '{path + '.' if path else ''}{key}'")

    def _add(self, holder: MutableMapping[str, Any], key: str, held: object, name: str) -> None:
        self._places.append((holder, key, held))
        self._names.append(name)

    def look(self) -> None:
        places, start = self._places, self._next
        for holder, key, held in places[start : start + _AT_ONCE]:
            if holder.get(key) is not held:
                self.look_at_all()
        self._next = start + _AT_ONCE if start + _AT_ONCE < len(places) else 0

    def look_at_all(self) -> None:
        gone = [
            name
            for name, (holder, key, held) in zip(self._names, self._places, strict=True)
            if holder.get(key) is not held
        ]
        if gone:
            _refuse(gone)


def _refuse(gone: list[str]) -> NoReturn:
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    raise ValueError(
        f"{gone[0]}{more} was replaced by another object after it had been handed over: what is trained now would not "
        "be synchronised. Expected the same parameters all along; shard, convert and assign first, then make the "
        "optimizer and wrap it"
    )
