"""Outer optimizers, with a small sweep of their learning rate."""

from diloco.evidence.table import LOSS, Claim, Column, Row, Table, best_difference
from diloco.evidence.train import BASE

SGD = {f"sgd, lr {lr}": BASE.but(outer_optimizer="sgd", outer_lr=lr) for lr in (0.7, 1.0, 1.4, 2.0)}
NESTEROV = {
    f"nesterov {mu}, lr {lr}": BASE.but(outer_optimizer="nesterov", outer_momentum=mu, outer_lr=lr)
    for mu, rates in ((0.6, (0.4, 0.7)), (0.9, (0.3, 0.7, 1.0)))
    for lr in rates
}
ADAM = {
    f"adam 0.9, lr {lr}": BASE.but(outer_optimizer="adam", outer_momentum=0.9, outer_lr=lr) for lr in (0.1, 0.3, 1.0)
}

TABLE = Table(
    name="outer",
    title="Outer optimizers",
    intro="M = 4, equal speeds, H = 24, 8 fragments, RDA, about 26 outer steps on each fragment: a short run, in which "
    "the long-run gain of momentum 0.9 (ten outer steps) is only just reached. Adam as DiLoCo 2023 tried it: beta2 "
    "0.95, epsilon 0.1, which is above most of Delta, so that it acts like SGD with momentum and lr / 0.1.",
    rows=tuple(Row(name, config) for name, config in (SGD | NESTEROV | ADAM).items()),
    columns=(LOSS, Column("norm", "norm of Delta")),
    claims=(
        Claim(
            "Nesterov is better than SGD",
            "DiLoCo 2023",
            best_difference(list(SGD), list(NESTEROV)),
            "loss of the best SGD - the best Nesterov",
        ),
        Claim(
            "Nesterov is better than Adam",
            "DiLoCo 2023",
            best_difference(list(ADAM), list(NESTEROV)),
            "loss of the best Adam - the best Nesterov",
        ),
        Claim(
            "With RDA the best learning rate of Nesterov 0.9 is below 0.7",
            "this project: RDA does not shrink Delta",
            best_difference(["nesterov 0.9, lr 0.7", "nesterov 0.9, lr 1.0"], ["nesterov 0.9, lr 0.3"]),
            "loss of the better of 0.7 and 1.0 - at 0.3",
        ),
    ),
    check="sgd, lr 1.0",
)
