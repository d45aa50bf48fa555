#!/usr/bin/env bash
# One syncer on this machine, one learner on each host that is reached by ssh:
#
#   examples/ssh.sh alice@gpu1 gpu2 gpu3
#
# The syncer listens on loopback only. Every learner reaches it through its own ssh connection (-R), so nothing is open
# to a network, everything is encrypted, and the hosts need no route to this machine. A learner that fails, or whose
# connection breaks, is started again under its old name; the others train on meanwhile.
#
# Environment:
#   SCRIPT    what a learner runs, with --syncer, --learner-id, --steps and --wait-for (examples/hf_trainer.py)
#   DIR       folder on the hosts that SCRIPT and PYTHON are relative to (this repository's path here)
#   PYTHON    the interpreter there, of an environment with diloco (.venv/bin/python)
#   STEPS     steps of each learner (200)
#   RESTARTS  how often a learner is started again (3)
#   RUN_DIR   where the event log goes, for `diloco audit` (a new folder)
set -euo pipefail

if [ $# -eq 0 ]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi
here=$(cd "$(dirname "$0")/.." && pwd)
SCRIPT=${SCRIPT:-examples/hf_trainer.py}
DIR=${DIR:-$here}
PYTHON=${PYTHON:-.venv/bin/python}
STEPS=${STEPS:-200}
RESTARTS=${RESTARTS:-3}
RUN_DIR=${RUN_DIR:-$(mktemp -d)}

# ---- the syncer: a free port, told by a file ----
syncer=$here/diloco/bin/diloco-syncer
[ -x "$syncer" ] || syncer=diloco-syncer # installed by pip
"$syncer" --bind 127.0.0.1:0 --endpoint-file "$RUN_DIR/endpoint" --event-log "$RUN_DIR/events.jsonl" \
  --min-quorum 2 --sync-every 8 --num-fragments 4 --shutdown-s 1 2>"$RUN_DIR/syncer.log" &
syncer_pid=$!
learner_pids=()
trap 'kill $syncer_pid "${learner_pids[@]}" 2>/dev/null || true' EXIT
for _ in $(seq 100); do
  [ ! -s "$RUN_DIR/endpoint" ] || break
  sleep 0.1
done
endpoint=$(cat "$RUN_DIR/endpoint")
port=${endpoint##*:}
echo "syncer on port $port, event log $RUN_DIR/events.jsonl"

# ---- the learners ----
# -tt: a learner whose connection is gone gets a hang-up and ends, instead of holding the GPU for nobody.
learner() {
  local host=$1 id=${1##*@}-$2 try command child=
  command="cd $(printf %q "$DIR") && exec $(printf %q "$PYTHON") $(printf %q "$SCRIPT")"
  command+=" --syncer 127.0.0.1:$port --learner-id $(printf %q "$id") --steps $STEPS --wait-for $hosts"
  trap 'kill "$child" 2>/dev/null; exit 1' TERM
  for try in $(seq 0 "$RESTARTS"); do
    ssh -tt -o BatchMode=yes -o ExitOnForwardFailure=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4 \
      -R "$port:127.0.0.1:$port" "$host" "$command" </dev/null &
    child=$!
    if wait "$child"; then return 0; fi
    echo "learner $id ended with an error (try $((try + 1)) of $((RESTARTS + 1)))" >&2
    [ "$try" -eq "$RESTARTS" ] || sleep 5
  done
  return 1
}

hosts=$#
index=0
for host in "$@"; do
  learner "$host" "$index" &
  learner_pids+=($!)
  index=$((index + 1))
done
status=0
for pid in "${learner_pids[@]}"; do wait "$pid" || status=1; done

# ---- the end: open rounds may finish, the event log is whole ----
kill -TERM $syncer_pid
wait $syncer_pid || status=1
trap - EXIT
echo "$(grep -c '"event":"merge"' "$RUN_DIR/events.jsonl") rounds were merged"
exit $status
