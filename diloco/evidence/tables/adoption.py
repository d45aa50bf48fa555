"""What a learner keeps of its work when a fragment arrives; what travels together; where deltas are anchored."""

from diloco.evidence.table import LOSS, MERGED, Claim, Column, Row, Table, difference, lower, same
from diloco.evidence.train import BASE

UNEQUAL = BASE.but(speeds=(1.0, 1.05, 1.18, 3.0))

ADOPT = Table(
    name="adopt",
    title="Overwrite, blend, rebase",
    intro="4 learners that need 1, 1.05, 1.18 and 3 s for a step, ±5 %; H = 24, 8 fragments.",
    rows=tuple(Row(adopt, UNEQUAL.but(adopt=adopt)) for adopt in ("overwrite", "blend", "rebase")),
    columns=(LOSS, MERGED, Column("least_merged", "tokens merged of the worst learner", 1, percent=True)),
    claims=(
        Claim(
            "Rebase merges more of the work than overwrite",
            "this project",
            difference("rebase", "overwrite", "merged"),
            "share merged with rebase - with overwrite",
        ),
        lower("rebase", "overwrite", "Rebase gives a lower loss than overwrite", "this project"),
        lower("rebase", "blend", "Rebase gives a lower loss than blend", "this project"),
        same(
            "overwrite",
            "blend",
            0.02,
            "Blend and overwrite differ little",
            "Streaming DiLoCo blends, Decoupled DiLoCo overwrites",
        ),
    ),
    check="rebase",
)

SCHEMES = ("layer", "strided", "tensor", "balanced")
FRAGMENTS = Table(
    name="fragments",
    title="Fragment schemes",
    intro="M = 4, equal speeds, H = 24, 8 fragments of 24 tensors. The largest fragment sets the peak of the traffic.",
    rows=tuple(Row(scheme, BASE.but(fragmenter=scheme)) for scheme in SCHEMES),
    columns=(LOSS, Column("largest_fragment", "elements of the largest fragment", 0)),
    claims=(
        *(
            same(scheme, "balanced", 0.02, f"`{scheme}` is as good as `balanced`", "Decoupled DiLoCo, table 7")
            for scheme in SCHEMES[:3]
        ),
        Claim(
            "Peak bytes: layer above tensor",
            "Decoupled DiLoCo, table 7",
            difference("layer", "tensor", "largest_fragment"),
            "elements of the largest fragment, layer - tensor, at least 1",
            1.0,
        ),
        Claim(
            "Peak bytes: tensor above balanced",
            "Decoupled DiLoCo, table 7",
            difference("tensor", "balanced", "largest_fragment"),
            "elements of the largest fragment, tensor - balanced, at least 1",
            1.0,
        ),
    ),
    check="layer",
    notes="`layer` keeps neighbouring tensors together and cuts between any two of them, so it is more even here than "
    "the paper's fragments of whole layers; `tensor` and `strided` deal out in turn, and two large matrices meet.",
)

STALE = UNEQUAL.but(delay_s=1.0)
ANCHORS = tuple(
    Row(f"{anchor}, {adopt}", STALE.but(anchor=anchor, adopt=adopt))
    for adopt in ("overwrite", "rebase")
    for anchor in ("syncer", "learner")
)
ANCHOR = Table(
    name="anchor",
    title="Anchor of the outer gradient, with stale learners",
    intro="The four unequal learners of the table before, and every message takes 1 s, so contributions come from "
    "versions that are not the newest. `syncer` (the paper): relative to the newest version. `learner`: relative to "
    "the version that the learner had adopted.",
    rows=ANCHORS,
    columns=(LOSS, MERGED),
    claims=(
        lower(
            "learner, overwrite",
            "syncer, overwrite",
            "The learner's anchor is better when learners are stale (overwrite)",
            "this project",
        ),
        lower(
            "learner, rebase",
            "syncer, rebase",
            "The learner's anchor is better when learners are stale (rebase)",
            "this project",
        ),
    ),
    check="learner, rebase",
)
