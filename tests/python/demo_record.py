"""An invented demo run in which every check holds; tests spoil one thing each."""

from __future__ import annotations

from diloco.demo.record import Kill, Life, Losses, LossPoint, Member, Paired, Record, Round, Step

FRAGMENTS, STEPS, TOKENS = 4, 60, 1024
KILLED_S, BACK_S = 20.0, 32.0


def steps_of(start: float, end: float, period: float) -> list[Step]:
    count = int((end - start) / period)
    return [Step(start + i * period, i, i * TOKENS, 3.0 - 0.01 * i, 1.0, 0.0001, period) for i in range(1, count + 1)]


def life(learner: str, number: int, start: float, end: float, slowdown: float, code: int = 0) -> Life:
    return Life(
        learner=learner,
        pid=100 + number,
        started_s=start - 1,
        slowdown=slowdown,
        state="killed" if code else "closed",
        joined_s=start,
        ended_s=end,
        returncode=code,
        incarnation=f"{number:016x}",
        steps=steps_of(start, end, slowdown),
    )


def rounds_of(lives: list[Life]) -> list[Round]:
    rounds = []
    for i in range(2, 61):
        members = tuple(
            Member(one.learner, one.incarnation, 100, 0.25) for one in lives if one.steps[0].t < i <= one.steps[-1].t
        )
        rounds.append(Round(float(i), i, i % FRAGMENTS, (1, i // FRAGMENTS), members, "all_present", 0.01))
    return rounds


def good_record() -> Record:
    lives = [
        life("learner-0", 1, 0.0, 60.0, 1.0),
        life("learner-1", 2, 0.0, KILLED_S, 1.0, -9),
        life("learner-2", 3, 0.0, 60.0, 1.5),
        life("learner-3", 4, 0.0, 60.0, 3.0),
        life("learner-1", 5, BACK_S, 60.0, 1.0),
    ]
    curve = [LossPoint(float(t), t, 3 * t * TOKENS, 2.2 + 3.4 * 0.93**t) for t in range(0, 61, 4)]
    alone = [LossPoint(70.0 + t, t, t * TOKENS, 2.3 + 3.3 * 0.94**t) for t in range(0, 61, 4)]
    rounds = rounds_of(lives)
    fractions = {"learner-0": 0.99, "learner-1": 0.9, "learner-2": 0.98, "learner-3": 0.94}
    return Record(
        seed=0,
        steps=STEPS,
        fragments=FRAGMENTS,
        reference="learner-0",
        lives=lives,
        rounds=rounds,
        kill=Kill("learner-1", 102, 9, 9, KILLED_S, BACK_S, f"{5:016x}", 34.0),
        losses=Losses(5.5, 2.22, 2.31, curve, alone),
        audit={
            "ok": True,
            "errors": [],
            "rounds": len(rounds),
            "ledger": {"processed": 100, "merged": 90, "outstanding": 4, "in_flight": 0, "discarded": {"lost": 6}},
            "learners": {name: {"merged_fraction": share} for name, share in fractions.items()},
        },
        paired=Paired(tuple(0.1001 + 0.0001 * (i % 3) for i in range(30)), (0.1,) * 30, (0.0001,) * 30),
        status={
            "fragments": [{"version": [1, 15]} for _ in range(FRAGMENTS)],
            "bytes": {"in": 1000, "out": 2000},
            "learners": [],
        },
        alone_steps=60,
        trained_s=60.0,
        wall_s=130.0,
    )
