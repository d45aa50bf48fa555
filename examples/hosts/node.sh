#!/usr/bin/env bash
# One host of an island: hosts that train one copy of the model together and are one learner of the run. The same on every
# host, but for NODE_RANK; an island of one host needs SYNCER and ISLAND only:
#
#   SYNCER=10.0.0.1:29400 ISLAND=a NODES=2 NODE_RANK=0 MASTER_ADDR=10.1.0.1 INTERFACE=eth1 examples/hosts/node.sh
#   SYNCER=10.0.0.1:29400 ISLAND=a NODES=2 NODE_RANK=1 MASTER_ADDR=10.1.0.1 INTERFACE=eth1 examples/hosts/node.sh
#   SYNCER=10.0.0.1:29400 ISLAND=b examples/hosts/node.sh
#
# An island lives and dies as one: when a host of it is lost, the others' collectives fail after the timeout the script
# gives init_process_group, torchrun ends on each host, and each host starts it again. They meet at MASTER_ADDR, as soon as
# all of them are there, and take up the global weights. The other islands train on meanwhile.
#
# Environment:
#   SYNCER       host:port of the syncer, as this host reaches it
#   ISLAND       name of the island in the run, the same on all its hosts
#   NODES        hosts of the island (1)
#   NODE_RANK    which of them this is; rank 0 is the one with MASTER_ADDR (0)
#   MASTER_ADDR  address of rank 0 on the island's own network (127.0.0.1)
#   MASTER_PORT  free port there (29500)
#   INTERFACE    this host's interface on that network, for Gloo and NCCL (theirs to choose)
#   RANKS        processes on this host, one for each GPU (1)
#   SCRIPT       what they run, with --syncer, --learner-id and OPTIONS (examples/fsdp2_island.py)
#   OPTIONS      further options of SCRIPT, separated by spaces (none)
#   PYTHON       the interpreter, of an environment with diloco (.venv/bin/python)
#   RESTARTS     how often the island is started again (100)
#   PAUSE_S      seconds before that (5)
#   MEET_S       how long a host waits for the others of its island, in seconds (600)
set -euo pipefail

: "${SYNCER:?expected host:port of the syncer}" "${ISLAND:?expected a name for the island}"
NODES=${NODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
RANKS=${RANKS:-1}
SCRIPT=${SCRIPT:-examples/fsdp2_island.py}
PYTHON=${PYTHON:-.venv/bin/python}
RESTARTS=${RESTARTS:-100}
PAUSE_S=${PAUSE_S:-5}
MEET_S=${MEET_S:-600}
read -ra options <<<"${OPTIONS:-}"
if [ -n "${INTERFACE:-}" ]; then
  # By default each of them takes the address that this host's name resolves to: often 127.0.1.1, or the slow network.
  export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

child=
trap 'kill "$child" 2>/dev/null; exit 143' TERM INT
for try in $(seq 0 "$RESTARTS"); do
  "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$RANKS" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-conf "timeout=$MEET_S" --max-restarts 0 \
    "$SCRIPT" --syncer "$SYNCER" --learner-id "$ISLAND" "${options[@]}" <&0 &
  child=$!
  if wait "$child"; then exit 0; fi
  echo "island $ISLAND, host $NODE_RANK: ended with an error (try $((try + 1)) of $((RESTARTS + 1)))" >&2
  [ "$try" -eq "$RESTARTS" ] || sleep "$PAUSE_S"
done
exit 1
