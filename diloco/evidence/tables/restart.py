"""A syncer that comes back: from its learners' newest anchors, and from a state that is 120 steps old."""

from diloco.evidence.table import LOSS, Claim, Row, Table, difference, same
from diloco.evidence.train import BASE, Action

BACK, DEATH = 120, 280.0
ARCHIVE = 3  # the learner that is stopped 120 steps before and so holds the old state

STOPPED: tuple[Action, ...] = ((DEATH - BACK, "freeze", ARCHIVE), (DEATH, "thaw", ARCHIVE))
CRASH: tuple[Action, ...] = ((DEATH, "kill syncer", 0), (DEATH + 5.0, "start syncer", 0))
# Nobody else reaches the new syncer until it has taken the old state.
OLD: tuple[Action, ...] = (
    (DEATH - BACK, "freeze", ARCHIVE),
    *((DEATH - 1.0, "cut", learner) for learner in range(ARCHIVE)),
    (DEATH, "kill syncer", 0),
    (DEATH, "thaw", ARCHIVE),
    (DEATH + 5.0, "start syncer", 0),
    *((DEATH + 20.0, "heal", learner) for learner in range(ARCHIVE)),
)
MARGIN = 0.03

TABLE = Table(
    name="restart",
    title="Restart of the syncer",
    intro=f"M = 4, H = 24, 8 fragments. The syncer is killed at step {DEATH:.0f} and started again 5 s later without "
    "state. `newest anchors`: all learners bring theirs. `120 steps back`: one learner had been stopped at step "
    f"{DEATH - BACK:.0f} and is the only one that reaches the new syncer in its first 15 s, so the weights are 120 "
    "steps old when the others, who hold newer ones, return. `stopped learner` is that run without the syncer's death.",
    rows=(
        Row("undisturbed", BASE.but(curve=True)),
        Row("newest anchors", BASE.but(curve=True, script=CRASH)),
        Row("stopped learner", BASE.but(curve=True, script=STOPPED)),
        Row("120 steps back, anchor learner", BASE.but(curve=True, script=OLD, anchor="learner")),
        Row("120 steps back, anchor syncer", BASE.but(curve=True, script=OLD, anchor="syncer")),
        Row("120 steps fewer", BASE.but(curve=True, steps=BASE.steps - BACK)),
    ),
    columns=(LOSS,),
    claims=(
        same("newest anchors", "undisturbed", MARGIN, "A restart without state returns to the curve", "this project"),
        *(
            same(
                f"120 steps back, anchor {anchor}",
                "stopped learner",
                MARGIN,
                f"A restart from 120 steps back returns to the curve with anchor = {anchor}",
                "this project",
            )
            for anchor in ("learner", "syncer")
        ),
        *(
            Claim(
                f"It costs no more than the 120 steps that are lost, with anchor = {anchor}",
                "this project",
                difference(f"120 steps back, anchor {anchor}", "120 steps fewer"),
                f"loss of `120 steps back, anchor {anchor}` - `120 steps fewer`, at most {MARGIN}",
                -1.0,
                MARGIN,
            )
            for anchor in ("learner", "syncer")
        ),
        same(
            "120 steps back, anchor syncer",
            "120 steps back, anchor learner",
            0.01,
            "Learners adopt the old state before they contribute to it, so the anchor makes no difference",
            "this project",
        ),
    ),
    check="120 steps back, anchor learner",
    curve_at=(260.0, 280.0, 300.0, 320.0, 340.0, 400.0, 460.0, 520.0, 580.0, 640.0),
    notes="There is no stored state to restart from yet: the old state comes from a learner's anchors. `120 steps "
    "fewer` has a schedule of its own, which ends at step 520.",
)
