"""`diloco doctor`: is this machine ready to be a learner of that syncer, or to be a syncer? Everything that can be
known before a run is looked at, and the first thing that is wrong is named with what to do about it."""

from diloco.doctor.learner_side import LearnerSide, check_learner
from diloco.doctor.report import Check, Report
from diloco.doctor.syncer_side import SyncerSide, check_syncer

__all__ = ["Check", "LearnerSide", "Report", "SyncerSide", "check_learner", "check_syncer"]
