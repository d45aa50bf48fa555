"""Which tensors of a model take part, under which names. Pairing between learners is by name, never by position."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from diloco._errors import describe_tensor, logger, name_list
from diloco._sharded import is_sharded, like, local

Named = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

# Wrappers that may sit anywhere in a name: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
_LESS_PRECISE = {torch.float64: "float32", torch.complex128: "complex64"}


@dataclass
class Parameter:
    """One tensor that is synchronised, with the other names of the same storage."""

    name: str
    tensor: Tensor
    aliases: list[str] = field(default_factory=list)
    # What travels: the tensor, of a DTensor what this process holds, of a complex one the real view, (..., 2).
    real: Tensor = field(init=False)

    def __post_init__(self) -> None:
        held = local(self.tensor)
        self.real = torch.view_as_real(held.detach()) if held.is_complex() else held

    def follow(self) -> None:
        """Memory that was replaced (`p.data = ...`)."""
        held = local(self.tensor)
        if self.real.data_ptr() != held.data_ptr():
            self.real.data = torch.view_as_real(held.detach()) if held.is_complex() else held.detach()

    def as_parameter(self, values: Tensor) -> Tensor:
        """f32 values of `real` in the parameter's own shape, dtype and sharding."""
        own = (torch.view_as_complex(values) if self.tensor.is_complex() else values).to(self.tensor.dtype)
        return like(own, self.tensor)


def travels(tensor: Tensor) -> tuple[list[int], str]:
    """Shape and dtype that a tensor has on the wire's side."""
    if tensor.is_complex():
        return [*tensor.shape, 2], str(tensor.dtype.to_real()).removeprefix("torch.")
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def repeatable(model: Named) -> nn.Module | list[tuple[str, Tensor]]:
    """The same, able to be looked at more than once."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, Iterable):
        raise TypeError(f"expected a torch.nn.Module, or its named_parameters(), got {type(model).__name__}")
    return list(model.items() if isinstance(model, Mapping) else model)


def named_tensors(model: Named) -> list[tuple[str, Tensor]]:
    """Every name with its tensor; a tied tensor appears once per name."""
    if isinstance(model, nn.Module):
        return list(model.named_parameters(remove_duplicate=False))
    pairs = repeatable(model)
    assert isinstance(pairs, list)
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise TypeError(
                "expected a torch.nn.Module, or its named_parameters(): pairs of name and tensor; "
                f"got an element of type {type(pair).__name__}"
            )
    return pairs


def clean_names(names: list[str]) -> list[str]:
    """Names without the prefixes that compiling or wrapping a module adds, so that all learners agree."""
    cleaned = []
    for name in names:
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        cleaned.append(name)
    # DDP and DataParallel put everything below "module."; a sub-module that happens to be called so keeps its name.
    while cleaned and all(name.startswith("module.") for name in cleaned):
        cleaned = [name.removeprefix("module.") for name in cleaned]
    twice = [name for name, count in Counter(cleaned).items() if count > 1]
    return names if twice and len(set(names)) == len(names) else cleaned


def collect(model: Named) -> list[Parameter]:
    """The trainable tensors of `model` in order, tied ones once. ValueError names what cannot be synchronised."""
    pairs = named_tensors(model)
    found: dict[object, Parameter] = {}
    for name, tensor in zip(clean_names([name for name, _ in pairs]), (tensor for _, tensor in pairs), strict=True):
        if not tensor.requires_grad:
            continue
        _check_tensor(name, tensor)
        known = found.setdefault(_storage_key(tensor), Parameter(name, tensor))
        if known.name != name:
            known.aliases.append(name)
    return list(found.values())


Spec = tuple[str, list[int], str, list[str]]  # name, shape, dtype, other names of the same tensor


def specs(model: Named) -> list[Spec]:
    """The trainable tensors as the syncer sees them, tied ones once. Values do not matter: the meta device will do."""
    pairs = [(name, tensor) for name, tensor in named_tensors(model) if tensor.requires_grad]
    named: dict[object, tuple[Tensor, list[str]]] = {}
    for name, (_, tensor) in zip(clean_names([name for name, _ in pairs]), pairs, strict=True):
        key = id(tensor) if tensor.is_meta else _storage_key(tensor)
        named.setdefault(key, (tensor, []))[1].append(name)
    return [(names[0], *travels(tensor), names[1:]) for tensor, names in named.values()]


def of_optimizer(model: Named, optimizer: torch.optim.Optimizer) -> list[Parameter]:
    """The tensors that both are trainable parameters of `model` and belong to `optimizer`."""
    pairs = named_tensors(model)
    names = {id(tensor): name for name, tensor in pairs}
    ours: set[int] = set()
    strangers = []
    for g, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for i, tensor in enumerate(group["params"]):
            ours.add(id(tensor))
            label = names.get(id(tensor)) or (given[i] if given else f"number {i} of group {g}")
            if id(tensor) not in names:
                strangers.append(f"{label}: {describe_tensor(tensor)}")
            elif not (tensor.is_floating_point() or tensor.is_complex()):
                raise ValueError(_cannot_travel(label, tensor, "a floating-point or complex dtype"))
    if strangers:
        raise ValueError(
            f"the optimizer has {len(strangers)} parameter(s) that are not in the model ({name_list(strangers)}); "
            "expected only parameters of the model that was passed. Pass that model, or make the optimizer from "
            "model.parameters() after the model has its final form (compiled, moved, converted, sharded)."
        )
    chosen = [pair for pair in pairs if id(pair[1]) in ours]
    left = [name for name, tensor in pairs if tensor.requires_grad and id(tensor) not in ours]
    parameters = collect(chosen)
    if not parameters:
        raise ValueError(
            f"nothing to synchronise: none of the optimizer's {len(ours)} parameters requires grad; "
            "unfreeze what is to be trained before wrapping the optimizer"
        )
    if left:
        logger.warning(
            "%d trainable parameter(s) of the model are not in this optimizer and stay local: %s",
            len(left),
            name_list(left),
        )
    return parameters


def added(model: Named, tensors: Iterable[Tensor], given: Mapping[int, str], known: list[Parameter]) -> list[Parameter]:
    """Those of the trainable `tensors` that can be synchronised from now on: not tied to a known one, and named, in the
    model as it is now or (by id) in `given`. A warning says which of them cannot travel."""
    pairs = named_tensors(model)
    names: dict[object, list[str]] = {}
    for name, (_, tensor) in zip(clean_names([name for name, _ in pairs]), pairs, strict=True):
        names.setdefault(_storage_key(tensor), []).append(name)
    taken = {_storage_key(parameter.tensor) for parameter in known}
    found = []
    for tensor in tensors:
        key = _storage_key(tensor)
        own = names.get(key) or clean_names([given[id(tensor)]] if id(tensor) in given else [])
        if not own or key in taken:
            continue
        try:
            _check_tensor(own[0], tensor)
        except ValueError as error:
            logger.warning("%s", error)
            continue
        taken.add(key)
        found.append(Parameter(own[0], tensor, own[1:]))
    return found


def notice_buffers(model: Named) -> None:
    """Says which state of the model is left alone: BatchNorm's running statistics, a router's balance."""
    if not isinstance(model, nn.Module):
        return
    names = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set
    ]
    if names:
        logger.warning(
            "%d floating-point buffers stay local to each learner and are not merged: %s",
            len(names),
            name_list(clean_names(names)),
        )


def shard_seed(learner_id: str, seed: int = 0) -> int:
    """A seed for data order and dropout that differs between learners and is the same after a restart.

    Learners started with one common seed would all draw the same batches: the compute of many for the data of one.
    """
    digest = hashlib.blake2b(f"{seed}:{learner_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch.manual_seed takes 63 bits without wrapping


def _storage_key(tensor: Tensor) -> object:
    if is_sharded(tensor):
        return id(tensor)
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _cannot_travel(name: str, tensor: Tensor, expected: str) -> str:
    return (
        f"parameter '{name}' is {describe_tensor(tensor)}; expected {expected}. "
        "Leave it out of the optimizer, or freeze it with requires_grad_(False)."
    )


def _check_tensor(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter '{name}' has no shape yet; run one forward pass before wrapping the optimizer")
    if tensor.is_meta:
        raise ValueError(f"parameter '{name}' is on the meta device and has no values; materialise the model first")
    tensor = local(tensor)  # whether the ranks of a DTensor can be an island: island.py
    if tensor.layout != torch.strided:
        raise ValueError(_cannot_travel(name, tensor, f"a dense tensor, not {tensor.layout}"))
    if tensor.dtype not in _SUPPORTED:
        raise ValueError(_cannot_travel(name, tensor, "float32, bfloat16, float16, float64, complex64 or complex128"))
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"parameter '{name}' is an expanded tensor: several of its elements share memory; clone() it first"
        )
    if tensor.is_conj():
        raise ValueError(f"parameter '{name}' is a conjugated view; resolve_conj() it before wrapping the optimizer")
    if tensor.dtype in _LESS_PRECISE:
        dtype = str(tensor.dtype).removeprefix("torch.")
        logger.warning(
            "parameter '%s' is %s; it is synchronised with %s precision", name, dtype, _LESS_PRECISE[tensor.dtype]
        )
