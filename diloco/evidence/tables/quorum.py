"""Quorum and grace with learners of unequal speed."""

from diloco.config import SettingValue
from diloco.evidence.table import GOODPUT, LOSS, MERGED, Claim, Column, Row, Table, lower, of, same
from diloco.evidence.train import BASE

SOURCE = "Decoupled DiLoCo, section on heterogeneous learners"
UNEQUAL = BASE.but(speeds=(1.0,) * 4 + (1.18,) * 4, jitter=0.1)
KINDS: dict[str, dict[str, SettingValue]] = {
    "K = 8": {"min_quorum": 8},
    "K = 1, no grace": {"min_quorum": 1, "grace": "none"},
    "K = 1, grace": {"min_quorum": 1, "grace": "adaptive"},
}
ROWS = tuple(
    Row(f"{kind}, {adopt}", UNEQUAL.but(adopt=adopt, **settings))
    for adopt in ("overwrite", "rebase")
    for kind, settings in KINDS.items()
)

TABLE = Table(
    name="quorum",
    title="Quorum and grace with unequal learners",
    intro="8 learners, four of them 18 % slower, every step ±10 %; all train for the same time. Goodput is the advance "
    "of the syncer's clock T_K over the steps of the fastest learner. The paper adopts by overwriting.",
    rows=ROWS,
    columns=(GOODPUT, LOSS, MERGED, Column("members", "members of a round", 2)),
    claims=(
        Claim(
            "K = M is slowed down to the slowest learner",
            f"{SOURCE}: 84 %",
            of("K = 8, overwrite", "goodput"),
            "goodput, within 80 % and 90 %",
            0.80,
            0.90,
        ),
        Claim(
            "K = 1 with grace runs at full speed",
            f"{SOURCE}: 100 %",
            of("K = 1, grace, overwrite", "goodput"),
            "goodput, at least 97 %",
            0.97,
        ),
        lower(
            "K = 1, grace, overwrite",
            "K = 1, no grace, overwrite",
            "K = 1 without grace is clearly worse than with it",
            SOURCE,
        ),
        lower(
            "K = 8, overwrite",
            "K = 1, no grace, overwrite",
            "K = 1 without grace is clearly worse than K = M",
            SOURCE,
        ),
        lower(
            "K = 1, grace, overwrite",
            "K = 8, overwrite",
            "K = 1 with grace is at least as good as K = M",
            SOURCE,
        ),
        same(
            "K = 1, no grace, rebase",
            "K = 1, grace, rebase",
            0.02,
            "With rebase and the mailbox a round without grace costs little: what misses it is in the next",
            "this project",
        ),
    ),
    check="K = 1, grace, overwrite",
    notes="Without grace a round closes with the first answer. What the others send lies in their mailboxes and is "
    "merged in the next round, with work that is H older by then; with rebase none of it is lost, but fragments take "
    "outer steps for one learner's work in between.",
)
