"""`diloco demo`: real processes train a small language model, lose one learner to SIGKILL, and check themselves.

The path of the data: `run` checks the options; `experiment` starts a syncer and the learners (`cluster`, `processes`,
`learner_process`), watches them (`watch`, `table`), evaluates the global weights (`evaluate`), and hands what happened
(`record`) to `checks`, `report` and `picture`. `plan` has the numbers of the experiment.
"""
