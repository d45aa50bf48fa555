"""What a plan means before anything is started: which tensors travel together, when, and how even the load is."""

from __future__ import annotations

from dataclasses import dataclass

from diloco import config
from diloco._native import _C
from diloco.parameters import Named, specs


@dataclass(frozen=True)
class FragmentPlan:
    """One fragment: its tensors, elements, bytes per sync, and the step of its first one."""

    fragment: int
    tensors: list[str]
    numel: int
    up_bytes: int
    down_bytes: int
    due: int


@dataclass(frozen=True, repr=False)
class Explanation:
    """A plan. `str()` is the table to read; `peak_up_bytes` is the most that becomes due in one step,
    `ideal_peak_up_bytes` the same if all fragments were equal, `oversized` names the tensors larger than their share.
    """

    fragments: list[FragmentPlan]
    numel: int
    peak_up_bytes: int
    ideal_peak_up_bytes: float
    oversized: list[str]
    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def explain(model: Named, **settings: config.SettingValue) -> Explanation:
    """The plan of `model` under `settings` (docs/settings.md, and DILOCO_* variables), as the syncer makes it.

    Nothing is started, and values do not matter: a model on the meta device will do. ValueError for settings that do
    not fit together.
    """
    texts = config.environment_settings() | config.setting_texts(settings, "explain", ("model",))
    plan, text = _C.explain_plan(specs(model), texts)
    fragments = [FragmentPlan(f.fragment, f.tensors, f.numel, f.up_bytes, f.down_bytes, f.due) for f in plan.fragments]
    return Explanation(fragments, plan.numel, plan.peak_up_bytes, plan.ideal_peak_up_bytes, plan.oversized, text)
