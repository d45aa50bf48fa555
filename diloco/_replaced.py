"""Notices when a model's parameters are no longer the objects that were handed over (sharded, converted, assigned)."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from torch import nn

from diloco._errors import name_list
from diloco._sharded import is_sharded
from diloco.parameters import Named, Parameter

_AT_ONCE = 4


class Watch:
    """Every step looks at a few places of the model, in turn: what replaces parameters replaces all of them, so it is
    seen at the next step. When all fragments have been adopted once more, and when the model has been loaded, all
    places are looked at. Modules may be put around others (checkpointing, parametrizations): the same parameters at
    other places are followed.
    """

    def __init__(self, model: Named, parameters: list[Parameter]) -> None:
        self._model = model if isinstance(model, nn.Module) else None
        self._names: dict[int, str] = {}
        self._next = 0
        self.add(parameters)

    def add(self, parameters: list[Parameter]) -> None:
        # FSDP2 itself puts others in the place of a sharded parameter while it computes.
        self._names |= {id(p.tensor): p.name for p in parameters if not is_sharded(p.tensor)}
        self._find()

    def _find(self) -> None:
        self._places: list[tuple[MutableMapping[str, Any], str, object]] = []
        self._times: Counter[int] = Counter()  # a tied parameter has several places
        for module in self._model.modules() if self._model is not None else ():
            for key, tensor in module._parameters.items():
                if id(tensor) in self._names:
                    self._places.append((module._parameters, key, tensor))
                    self._times[id(tensor)] += 1
            for key, child in module._modules.items():  # a module above a parameter may be replaced as a whole
                if child is not None and any(id(p) in self._names for p in child.parameters()):
                    self._places.append((module._modules, key, child))

    def look(self) -> None:
        places, start = self._places, self._next
        for holder, key, held in places[start : start + _AT_ONCE]:
            if holder.get(key) is not held:
                self._compare()
                break
        self._next = start + _AT_ONCE if start + _AT_ONCE < len(places) else 0

    def look_at_all(self) -> None:
        if any(holder.get(key) is not held for holder, key, held in self._places):
            self._compare()

    def _compare(self) -> None:
        places, before = self._places, self._times
        self._find()
        gone = [name for key, name in self._names.items() if self._times[key] < before[key]]
        if gone:
            self._places, self._times = places, before  # refused again at the next step
            raise ValueError(
                f"{len(gone)} parameter(s) of the model were replaced by other objects after they had been handed over "
                f"({name_list(gone)}): what is trained now would not be synchronised. Expected the same parameters all "
                "along; shard, convert and assign first, then make the optimizer and wrap it"
            )
