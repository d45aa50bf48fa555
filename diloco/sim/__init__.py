"""The virtual cluster from Python: the production cores under a virtual clock, with learners of your own.

::

    cluster = VirtualCluster(
        [LearnerSpec("a"), LearnerSpec("b", step_s=1.5)],
        model=lambda learner: Net(),                # the module of one life of a learner
        begin=lambda learner, module: ...,          # make its optimizer
        step=lambda learner, module: ...,           # one inner step; returns its tokens
        sync_every=24, num_fragments=4,
    )
    cluster.run_until(600.0)                        # virtual seconds
    loss = evaluate(cluster.global_parameters())

One process, one thread, no waiting: a step takes the virtual time its LearnerSpec says. The same arguments and seed
give the same history. The module's parameters live in the cluster's own arrays, where the production code stages from
and adopts into; only float32 is supported.
"""

from diloco.sim.cluster import VirtualCluster
from diloco.sim.types import LearnerSpec, Ledger, Member, Merge

__all__ = ["LearnerSpec", "Ledger", "Member", "Merge", "VirtualCluster"]
