"""All tables, in the order of the page."""

from diloco.evidence.table import Table
from diloco.evidence.tables import adoption, asynchronous, classic, merge, outer, quorum, restart, schedule, starvation

TABLES: tuple[Table, ...] = (
    merge.TABLE,
    quorum.TABLE,
    schedule.INTERVALS,
    outer.TABLE,
    schedule.MOMENTUM,
    adoption.ADOPT,
    adoption.FRAGMENTS,
    adoption.ANCHOR,
    classic.TABLE,
    asynchronous.TABLE,
    restart.TABLE,
    starvation.TABLE,
)
