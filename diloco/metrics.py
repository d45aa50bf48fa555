"""Numbers of a learner for TensorBoard, W&B and the console: one flat dictionary, whatever features are in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Metrics = dict[str, float]

# Every reason that a learner or a syncer may discard work for; a key for each, also where none ever occurs.
_REASONS = ("overwritten", "blended", "carry_limit", "lost", "stale", "nonfinite", "refused")
_OUTER = ("epoch", "clock", "run_clock", "run_tokens", "adoptions")
_SYNC = (
    *("contributions_sent", "contributions_merged", "reconnects", "tokens_merged", "tokens_outstanding"),
    "stepped_directly",
    *("bytes_in", "bytes_out", "malformed_frames", "staged_bytes", "sent_image_bytes", "arriving_bytes"),
    *("stage_s", "adopt_s", "hold_s", "blocked_s", "blocked_longest_s"),
)
_GOODPUT = ("wall_s", "compute_s", "lost_s", "staging_s", "waiting_s", "catching_up_s")


def flatten(stats: Mapping[str, Any], status: Mapping[str, Any] | None = None, **train: float) -> Metrics:
    """`optimizer.stats()` as numbers under `train/`, `outer/`, `sync/` and `goodput/`.

    Args:
        stats: of DiLoCoOptimizer or Learner.
        status: `diloco.status()`; adds what only the syncer knows, under `outer/` and `sync/`.
        train: values of your own, such as loss=2.3, under `train/`.

    The keys are the same for every learner, setting and state; what a learner has none of is 0. Docs: operations.md.
    """
    versions = [n for _, n in stats["versions"]]
    goodput, discarded = stats["goodput"], stats["discarded"]
    out: Metrics = {f"train/{name}": float(value) for name, value in train.items()}
    for name in ("steps", "tokens"):
        out[f"train/{name}"] = float(stats[name])
        out[f"train/total_{name}"] = float(stats[f"total_{name}"])
    for name in _OUTER:
        out[f"outer/{name}"] = float(stats.get(name, 0))
    out["outer/version_min"] = float(min(versions, default=0))
    out["outer/version_max"] = float(max(versions, default=0))
    out["sync/connected"] = float(stats["state"] == "training")
    for name in _SYNC:
        out[f"sync/{name}"] = float(stats.get(name, 0))
    for reason in _REASONS:
        out[f"sync/discarded_{reason}"] = float(discarded.get(reason, 0))
    for name in _GOODPUT:
        out[f"goodput/{name}"] = float(goodput[name])
    out["goodput/fraction"] = _ratio(out["goodput/compute_s"], out["goodput/wall_s"])
    return out if status is None else out | _of_syncer(status)


def _of_syncer(status: Mapping[str, Any]) -> Metrics:
    ledger, learners = status["ledger"], status["learners"]
    return {
        "outer/rounds_merged": float(status["rounds_merged"]),
        "outer/rounds_open": float(len(status["rounds"])),
        "outer/learners_live": float(sum(learner["state"] == "live" for learner in learners)),
        "outer/merged_fraction": _ratio(ledger["merged"], ledger["processed"]),
        "sync/effective_sync_every": float(status["effective"]["sync_every"]),
        "sync/effective_overlap_steps": float(status["effective"]["overlap_steps"]),
        "sync/syncer_bytes_in": float(status["bytes"]["in"]),
        "sync/syncer_bytes_out": float(status["bytes"]["out"]),
        "sync/syncer_rss_bytes": float(status["memory"]["rss_bytes"]),
    }


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0


class _SummaryWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


class _WandbRun(Protocol):
    def log(self, data: dict[str, Any], step: int) -> object: ...


def to_tensorboard(writer: _SummaryWriter, metrics: Metrics, step: int) -> None:
    """Writes every metric to a `torch.utils.tensorboard.SummaryWriter`; the group is TensorBoard's section."""
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


def to_wandb(run: _WandbRun, metrics: Metrics, step: int) -> None:
    """Logs every metric to a run of W&B, what `wandb.init()` returns; the group is W&B's section."""
    run.log(dict(metrics), step=step)
