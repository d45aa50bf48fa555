"""Who takes part: learners of very unequal speed, slow links, one that was away. Nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco.evidence.table import Claim, Column, Results, Row, Table
from diloco.evidence.train import Result
from diloco.sim import LearnerSpec, Merge, VirtualCluster

STEP_S = 0.2  # of the fastest
SPEEDS = (1.0, 3.0, 1.18, 1.5, 1.05)  # dealt over the learners in turn
EVERY, FRAGMENTS, TOKENS = 24, 4, 100
STEPS, AWAY_FROM, AWAY = 3000, 400, 200  # of the fastest learner
LAYOUT = {f"layer.{i}.weight": (2, 3) for i in range(FRAGMENTS)}
LEAST = 0.9


@dataclass(frozen=True)
class Starvation:
    learners: int
    quorum: int
    transfer_steps: float  # each message is so long on its way, in steps of the fastest
    jitter: float

    def run(self, seed: int) -> Result:
        specs = [
            LearnerSpec(f"l{i:02}", STEP_S * SPEEDS[i % len(SPEEDS)], 0.0, TOKENS, self.jitter)
            for i in range(self.learners)
        ]
        cluster = VirtualCluster(
            specs,
            layout=LAYOUT,
            seed=seed + 1,
            delay_s=self.transfer_steps * STEP_S,
            settings={"sync_every": EVERY, "num_fragments": FRAGMENTS, "min_quorum": self.quorum},
        )
        away = self.learners - 1
        cluster.run_until(AWAY_FROM * STEP_S)
        cluster.partition_learner(away)
        back = (AWAY_FROM + AWAY) * STEP_S
        cluster.run_until(back)
        cluster.partition_learner(away, False)
        processed = cluster.ledger(away).processed
        cluster.run_until(STEPS * STEP_S)
        for violation in cluster.check():
            raise AssertionError(violation)
        merges = cluster.merges()
        result = Result()
        for i, spec in enumerate(specs):
            result.learners.append(account(cluster, i, merges, back if i == away else 0.0, spec))
        # Of its work since it is back; what it carried along comes on top.
        returned = result.learners[away]
        since = cluster.ledger(away).processed - processed
        late = sum(
            member.end - member.start
            for merge in merges
            for member in merge.members
            if merge.at > back and member.learner == specs[away].id
        )
        returned["merged"] = min(1.0, late / since)
        slow = [row for row in result.learners[:away] if row["step_s"] == STEP_S * max(SPEEDS)]
        fast = [row for row in result.learners[:away] if row["step_s"] == STEP_S]
        result.values = {
            "worst": min(row["merged"] for row in result.learners),
            "slow_joined": min(row["joined"] for row in slow),
            "slow_merged": min(row["merged"] for row in slow),
            "slow_h": max(row["effective_h"] for row in slow),
            "fast_joined": min(row["joined"] for row in fast),
            "fast_merged": min(row["merged"] for row in fast),
            "fast_h": max(row["effective_h"] for row in fast),
            "back_joined": returned["joined"],
            "back_merged": returned["merged"],
            "rounds": float(len(merges)),
        }
        return result


def account(
    cluster: VirtualCluster, learner: int, merges: list[Merge], since: float, spec: LearnerSpec
) -> dict[str, Any]:
    """Of one learner; `joined` and effective H of the rounds after `since`."""
    ledger = cluster.ledger(learner)
    rounds = [merge for merge in merges if merge.at > since]
    own = [member for merge in rounds for member in merge.members if member.learner == spec.id]
    steps = sum(member.steps for member in own)
    return {
        "id": spec.id,
        "step_s": spec.step_s,
        "joined": len(own) / max(1, len(rounds)),
        "merged": ledger.merged_fraction,
        "tokens": ledger.processed,
        "tokens_merged": ledger.merged,
        "tokens_open": ledger.open,
        "discarded": ledger.discarded,
        "effective_h": steps / max(1, len(own)),
    }


def rows() -> tuple[Row, ...]:
    out = []
    for learners in (4, 16):
        for quorum in sorted({1, 4, learners}):
            for transfer in (0.2, 2.0, 6.0):
                for jitter in (0.0, 0.05, 0.1):
                    name = f"M = {learners}, K = {quorum}, transfer {transfer:g}, jitter {jitter:.0%}"
                    out.append(Row(name, Starvation(learners, quorum, transfer, jitter)))
    return tuple(out)


def worst(results: Results) -> list[float]:
    seeds = range(len(next(iter(results.values()))))
    return [min(row[seed].values["worst"] for row in results.values()) for seed in seeds]


def starved(results: Results) -> list[str]:
    """Learners on a working link with less than LEAST of their work merged, one sentence each."""
    return [
        f"{name}, seed {seed}: {learner['id']} ({learner['step_s'] / STEP_S:g} times the step) has only "
        f"{learner['merged']:.1%} of its work merged"
        for name, row in results.items()
        for seed, result in enumerate(row)
        for learner in result.learners
        if learner["merged"] < LEAST
    ]


def percent(metric: str, heading: str) -> Column:
    return Column(metric, heading, 1, percent=True)


TABLE = Table(
    name="starvation",
    title="Nobody is starved",
    intro=f"Learners whose steps take 1, 3, 1.18, 1.5, 1.05 times {STEP_S} s in turn; H = {EVERY}, {FRAGMENTS} "
    f"fragments, rebase, {STEPS} steps of the fastest, nothing trained. Transfer: how long each message is on its way, "
    f"in steps of the fastest. The last learner is cut off from step {AWAY_FROM} for {AWAY} steps; its columns are "
    "about the time since. Joined: share of the merged rounds; effective H: mean steps in a merged contribution; each "
    "the worst of its kind. What became of each learner's tokens is in evidence.json.",
    rows=rows(),
    columns=(
        percent("fast_joined", "fastest: joined"),
        percent("fast_merged", "merged"),
        Column("fast_h", "effective H", 1),
        percent("slow_joined", "3 times slower: joined"),
        percent("slow_merged", "merged"),
        Column("slow_h", "effective H", 1),
        percent("back_joined", "returned: joined"),
        percent("back_merged", "merged"),
        percent("worst", "least merged of all"),
    ),
    claims=(
        Claim(
            f"Every learner on a working link has at least {LEAST:.0%} of its work merged",
            "this project",
            worst,
            "least share merged over all rows",
            LEAST,
        ),
    ),
    check="M = 4, K = 1, transfer 2, jitter 10%",
    seeds=2,
    notes="With a transfer of two steps (tau) or more the overlap leaves no slack for a grace window. With K < M a "
    "round then closes as soon as K answers are there, with what came too late for the round before, and learners take "
    "turns: each joins every other round, with work that is up to two H old. No work is lost by it.",
)
