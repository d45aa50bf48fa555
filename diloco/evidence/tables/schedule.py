"""How often to meet, and momentum against it. Classic DiLoCo: lockstep, the whole model at once."""

from diloco.config import SettingValue
from diloco.evidence.table import LOSS, Claim, Column, Row, Table, best_difference, difference, lower
from diloco.evidence.train import CLASSIC_BASE, Config

EVERY = (1, 2, 4, 8, 16, 32, 64, 128)
MOMENTUM_EVERY = (4, 16, 64)
MOMENTA = (0.6, 0.9)


def averaging(every: int) -> Config:
    return CLASSIC_BASE.but(sync_every=every)


def nesterov(every: int, momentum: float) -> Config:
    settings: dict[str, SettingValue] = {"outer_lr": 0.7, "outer_momentum": momentum, "sync_every": every}
    return CLASSIC_BASE.but(outer_optimizer="nesterov", **settings)


INTERVALS = Table(
    name="interval",
    title="Steps between two rounds",
    intro="M = 4, equal tokens, plain averaging (outer SGD with lr 1), lockstep, one fragment.",
    rows=tuple(Row(f"H = {every}", averaging(every)) for every in EVERY),
    columns=(LOSS, Column("rounds", "rounds", 0)),
    claims=(
        lower("H = 16", "H = 128", "Meeting less often costs quality: H = 128 is worse than H = 16", "DiLoCo 2023"),
        lower("H = 32", "H = 128", "H = 128 is worse than H = 32", "DiLoCo 2023"),
        Claim(
            "The loss per doubling of H is mild: H = 128 costs less than 5 % over H = 16",
            "DiLoCo 2023 (H = 1000: +2.9 % perplexity over H = 50)",
            lambda results: [
                large.values["loss"] / small.values["loss"] - 1.0
                for large, small in zip(results["H = 128"], results["H = 16"], strict=True)
            ],
            "relative difference of the losses, at most 5 %",
            -1.0,
            0.05,
        ),
        lower("H = 16", "H = 1", "H = 1 is the worst H", "scaling laws for DiLoCo, arXiv 2503.09799"),
    ),
    check="H = 16",
)

MOMENTUM = Table(
    name="momentum",
    title="Outer momentum by steps between two rounds",
    intro="M = 4, equal tokens, lockstep. Nesterov has lr 0.7; the first row of each H averages (lr 1, no momentum).",
    rows=tuple(
        row
        for every in MOMENTUM_EVERY
        for row in (
            Row(f"H = {every}, averaging", averaging(every)),
            *(Row(f"H = {every}, momentum {mu}", nesterov(every, mu)) for mu in MOMENTA),
        )
    ),
    columns=(LOSS, Column("norm", "norm of Delta"), Column("cosine", "cosine of outer gradients")),
    claims=(
        *(
            Claim(
                f"Nesterov momentum helps at H = {every}",
                "DiLoCo 2023",
                best_difference([f"H = {every}, averaging"], [f"H = {every}, momentum {mu}" for mu in MOMENTA]),
                "loss of averaging - the better momentum",
            )
            for every in MOMENTUM_EVERY
        ),
        Claim(
            "The best momentum is smaller when rounds are frequent: 0.9 loses more to 0.6 at H = 4 than at H = 64",
            "this project's reading of the gain of Nesterov",
            lambda results: [
                few - many
                for few, many in zip(
                    difference("H = 4, momentum 0.9", "H = 4, momentum 0.6")(results),
                    difference("H = 64, momentum 0.9", "H = 64, momentum 0.6")(results),
                    strict=True,
                )
            ],
            "(loss at 0.9 - at 0.6) at H = 4, minus the same at H = 64",
        ),
    ),
    check="H = 64, momentum 0.9",
)
