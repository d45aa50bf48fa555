#!/usr/bin/env bash
# One syncer on the first node, one learner on every node of a Slurm job:
#
#   sbatch --nodes=4 examples/slurm.sh
#
# Every learner is a job step of its own, so the end of one is nobody else's business: it is started again under its old
# name and takes up the global weights, while the others train on. --no-kill keeps the job when a node fails.
#
# The port of the syncer is open to the cluster's network, unencrypted (--insecure): use it where everybody is trusted.
# --signal: SIGTERM 60 s before the time is up; with diloco.leave_on_sigterm() in the script learners then say goodbye.
#
# Environment (sbatch passes yours on):
#   SCRIPT          what a learner runs, with --syncer, --learner-id, --steps and --wait-for (examples/hf_trainer.py)
#   PYTHON          an interpreter with diloco, at the same path on all nodes (.venv/bin/python)
#   STEPS           steps of each learner (200)
#   RESTARTS        how often a learner is started again (3)
#   SYNCER_ADDRESS  IPv4 address of the first node on the network to use (the first of `hostname -I`)
#   RUN_DIR         folder for event log and output (diloco-<job id>)
#SBATCH --job-name=diloco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --no-kill
#SBATCH --signal=TERM@60
set -euo pipefail

# Slurm runs a copy of this file elsewhere; the folder of `sbatch` is the one with examples/.
cd "${SLURM_SUBMIT_DIR:-.}"
SCRIPT=${SCRIPT:-examples/hf_trainer.py}
PYTHON=${PYTHON:-.venv/bin/python}
STEPS=${STEPS:-200}
RESTARTS=${RESTARTS:-3}
SYNCER_ADDRESS=${SYNCER_ADDRESS:-$(hostname -I | cut -d ' ' -f 1)}
RUN_DIR=${RUN_DIR:-diloco-$SLURM_JOB_ID}
mkdir -p "$RUN_DIR"

# ---- the syncer: on this node, beside the first learner; it needs no GPU. A free port, told by a file ----
syncer=diloco/bin/diloco-syncer
[ -x "$syncer" ] || syncer=diloco-syncer # installed by pip
"$syncer" --bind "$SYNCER_ADDRESS:0" --insecure --endpoint-file "$RUN_DIR/endpoint" \
  --event-log "$RUN_DIR/events.jsonl" --min-quorum 2 --sync-every 8 --num-fragments 4 --shutdown-s 1 \
  2>"$RUN_DIR/syncer.log" &
syncer_pid=$!
pids=()
trap 'kill $syncer_pid "${pids[@]}" 2>/dev/null || true' EXIT
for _ in $(seq 100); do
  [ ! -s "$RUN_DIR/endpoint" ] || break
  sleep 0.1
done
endpoint=$(sed 's,^tcp://,,' "$RUN_DIR/endpoint")
echo "syncer at $endpoint, event log $RUN_DIR/events.jsonl"

# ---- the learners ----
learner() {
  local node=$1 id=$SLURM_JOB_ID-node-$1 try status child=
  trap 'kill "$child" 2>/dev/null; exit 1' TERM
  for try in $(seq 0 "$RESTARTS"); do
    srun --nodes=1 --ntasks=1 --relative="$node" --exact --output="$RUN_DIR/$id.out" --open-mode=append \
      "$PYTHON" "$SCRIPT" --syncer "$endpoint" --learner-id "$id" --steps "$STEPS" --wait-for "$SLURM_JOB_NUM_NODES" &
    child=$! status=0
    wait "$child" || status=$?
    if [ $status -eq 0 ] || [ $status -eq 143 ]; then return 0; fi # 143: SIGTERM, the time is up
    echo "learner $id ended with an error (try $((try + 1)) of $((RESTARTS + 1)))" >&2
    [ "$try" -eq "$RESTARTS" ] || sleep 5
  done
  return 1
}

for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
  learner "$node" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=1; done

# ---- the end: open rounds may finish, the event log is whole ----
kill -TERM $syncer_pid
wait $syncer_pid || status=1
trap - EXIT
echo "$(grep -c '"event":"merge"' "$RUN_DIR/events.jsonl") rounds were merged"
exit $status
