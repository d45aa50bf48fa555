"""Momentum under asynchrony: each contribution applied on arrival, against rounds with a quorum."""

from diloco.evidence.table import LOSS, Claim, Column, Row, Table, best_difference, lower
from diloco.evidence.train import BASE

SOURCE = "Asynchronous Local-SGD, arXiv 2401.09135"
UNEQUAL = BASE.but(speeds=(1.0, 1.05, 1.18, 1.5), adopt="overwrite", merge="mean", num_fragments=1)
ARRIVAL = UNEQUAL.but(trigger="arrival", grace="none")
NAIVE = {
    f"async nesterov 0.9, lr {lr}": ARRIVAL.but(outer_optimizer="nesterov", outer_momentum=0.9, outer_lr=lr)
    for lr in (0.07, 0.7)
}
DELAYED = {
    "async delayed_nesterov 0.9, lr 0.7": ARRIVAL.but(
        outer_optimizer="delayed_nesterov", outer_momentum=0.9, outer_lr=0.7
    )
}
SGD = {f"async sgd, lr {lr}": ARRIVAL.but(outer_optimizer="sgd", outer_lr=lr) for lr in (0.25, 1.0)}
QUORUM = {
    "quorum nesterov 0.9, lr 0.7": UNEQUAL.but(
        min_quorum=4, outer_optimizer="nesterov", outer_momentum=0.9, outer_lr=0.7
    )
}

TABLE = Table(
    name="async",
    title="Asynchronous outer steps",
    intro="4 learners of speeds 1, 1.05, 1.18 and 1.5, H = 24, one fragment, mean, overwrite. `async`: "
    "`trigger = arrival`, each contribution is an outer step of its own and only its sender is answered.",
    rows=tuple(Row(name, config) for name, config in (NAIVE | DELAYED | SGD | QUORUM).items()),
    columns=(LOSS, Column("rounds", "outer steps", 0), Column("members", "members", 2)),
    claims=(
        lower(
            "quorum nesterov 0.9, lr 0.7",
            "async nesterov 0.9, lr 0.7",
            "Asynchronous Nesterov with the synchronous learning rate is clearly worse than rounds",
            SOURCE,
        ),
        lower(
            "async delayed_nesterov 0.9, lr 0.7",
            "async nesterov 0.9, lr 0.7",
            "Delayed Nesterov repairs it at the same learning rate",
            SOURCE,
        ),
        lower(
            "async nesterov 0.9, lr 0.07",
            "async nesterov 0.9, lr 0.7",
            "Naive asynchronous Nesterov needs a learning rate about ten times lower",
            f"{SOURCE}, the authors' notebook",
        ),
        Claim(
            "Outer SGD without momentum is better than naive Nesterov",
            SOURCE,
            best_difference(["async nesterov 0.9, lr 0.7"], list(SGD)),
            "loss of naive Nesterov at 0.7 - the best SGD",
        ),
        Claim(
            "Delayed Nesterov is better than SGD",
            SOURCE,
            best_difference(list(SGD), list(DELAYED)),
            "loss of the best SGD - delayed Nesterov",
        ),
    ),
    notes="Naive Nesterov with lr 0.7 diverges here: four updates in the time of a round, each with all the momentum.",
    check="async delayed_nesterov 0.9, lr 0.7",
)
