"""RDA against the weighted mean, by number of learners."""

from diloco.evidence.table import LOSS, Claim, Column, Row, Table, difference, lower, ratio
from diloco.evidence.train import BASE, speeds

PAPER = "Decoupled DiLoCo, appendix D.2"
ROWS = tuple(
    Row(f"{merge}, M = {learners}", BASE.but(merge=merge, speeds=speeds(learners)))
    for merge in ("rda", "mean")
    for learners in (2, 4, 8)
)

TABLE = Table(
    name="merge",
    title="RDA against the mean",
    intro="Delta is the norm of the merged outer gradient over all fragments, root mean square over the run. Equal "
    "speeds, H = 24, 8 fragments, outer SGD with lr 1.",
    rows=ROWS,
    columns=(Column("norm", "norm of Delta"), LOSS),
    claims=(
        Claim(
            "The norm of Delta does not depend on M with RDA",
            PAPER,
            ratio("rda, M = 8", "rda, M = 2", "norm"),
            "norm at M = 8 / M = 2, within 0.85 and 1.15",
            0.85,
            1.15,
        ),
        Claim(
            "With the mean it shrinks with M",
            PAPER,
            difference("mean, M = 2", "mean, M = 8", "norm"),
            "norm at M = 2 - at M = 8",
        ),
        Claim(
            "With the mean it shrinks like 1/√M",
            "Decoupled DiLoCo, appendix D.2; DiLoCo 2023",
            ratio("mean, M = 8", "mean, M = 2", "norm"),
            "norm at M = 8 / M = 2, within 0.4 and 0.65 (orthogonal: 0.5)",
            0.4,
            0.65,
        ),
        *(
            lower(f"rda, M = {m}", f"mean, M = {m}", f"RDA gives a lower loss at M = {m}", f"{PAPER}, tables 8 and 9")
            for m in (2, 4, 8)
        ),
    ),
    check="rda, M = 4",
    notes="The outer learning rate is the same everywhere, 1. A mean with a larger outer learning rate would close "
    "part of the gap; see the table of outer optimizers.",
)
