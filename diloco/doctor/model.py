"""The model that is going to be trained, as names, shapes and dtypes."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.doctor.report import Wrong
from diloco.parameters import Spec, specs

_FORM = "expected module:function, which returns a torch.nn.Module, or a .safetensors or torch file of a state_dict"
_SAFETENSORS = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_STATISTICS = ("running_mean", "running_var")


def load_specs(text: str) -> list[Spec]:
    """Wrong, with what to do, if `text` does not lead to a model."""
    path = Path(text)
    if path.is_file():
        tensors = _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
        return _specs_of_state(tensors, path)
    module, colon, function = text.partition(":")
    if not colon or not module or not function or "/" in module:
        raise Wrong(f"--model: {_FORM}; got '{text}', which is neither and no file")
    return _specs_of_module(_call(module, function, text), text)


def fingerprint(tensors: list[Spec]) -> str:
    """Eight hex digits that are equal for equal models, whatever the order of registration."""
    lines = sorted(f"{name} {shape} {dtype} {sorted(aliases)}" for name, shape, dtype, aliases in tensors)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=4).hexdigest()


def _call(module: str, function: str, text: str) -> object:
    sys.path.insert(0, "")  # as `python train.py` in this folder would find it
    try:
        return getattr(importlib.import_module(module), function)()
    except SystemExit as error:
        raise Wrong(
            f"--model {text}: expected a module that can be imported, and this one ends the process then "
            f"(SystemExit: {error}); put what it runs under: if __name__ == '__main__'"
        ) from error
    except Exception as error:  # whatever a stranger's code does
        where = f"{type(error).__name__}: {error}"
        raise Wrong(f"--model {text}: expected a function that can be called without arguments; {where}") from error
    finally:
        sys.path.pop(0)


def _specs_of_module(model: object, text: str) -> list[Spec]:
    if not isinstance(model, nn.Module):
        raise Wrong(f"--model {text}: expected a torch.nn.Module back, got {type(model).__name__}")
    found = specs(model)
    if not found:
        raise Wrong(f"--model {text}: no parameter of the model requires grad; unfreeze what is to be trained")
    return found


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Nothing is read but the names: on the meta device. Other names of a tensor are there as save_model() of
    safetensors notes them; save_pretrained() of transformers does not."""
    try:
        safe_open = importlib.import_module("safetensors").safe_open
    except ImportError as error:
        raise Wrong(f"--model {path}: reading it needs the package safetensors: pip install safetensors") from error
    tensors = {}
    try:
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if part.get_dtype() in _SAFETENSORS:
                    dtype = _SAFETENSORS[part.get_dtype()]
                    tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
            for alias, name in (file.metadata() or {}).items():
                if name in tensors:
                    tensors[alias] = tensors[name]
    except Exception as error:
        raise Wrong(f"--model {path}: {_FORM}; it cannot be read: {error}") from error
    return tensors


def _torch_file(path: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise Wrong(f"--model {path}: {_FORM}; it cannot be read safely: {str(error).splitlines()[0]}") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        got = f"one with the keys {list(found)[:5]}" if isinstance(found, Mapping) else type(found).__name__
        raise Wrong(f"--model {path}: expected a flat state_dict, name to tensor, got {got}; save model.state_dict()")
    return dict(found)


def _specs_of_state(tensors: Mapping[str, Tensor], path: Path) -> list[Spec]:
    """A file does not tell what is trained: all floating-point and complex tensors but running statistics."""
    trained = {
        name: tensor.requires_grad_()
        for name, tensor in tensors.items()
        if (tensor.is_floating_point() or tensor.is_complex()) and not name.endswith(_STATISTICS)
    }
    if not trained:
        raise Wrong(f"--model {path}: {_FORM}; it has no floating-point tensor")
    return specs(trained)
