#!/usr/bin/env bash
# A machine of a Ray cluster (see namespaces.py): PATH/OF/CONFIG [KEY=VALUE ...]. The first trains, too; the others have
# process ids of their own, as machines do.
set -euo pipefail
cluster=$PYTHONPATH/launch/ray_cluster.sh
directory=${1%/*} home=$(mktemp -d)
trap 'rm -rf "$home" || true' EXIT
export TOKEN_FILE=$directory/token STATE_DIR=$home/state NUM_CPUS=4 RAY=${PYTHON%/*}/ray ADDRESS=10.77.0.$((NODE_RANK + 1))
if [[ $NODE_RANK != 0 ]]; then
    until [[ -s $TOKEN_FILE ]]; do sleep 0.1; done
    FOREGROUND=1 unshare --pid --fork --kill-child --mount-proc bash "$cluster" worker 10.77.0.1 &
    until [[ -e $directory/done ]]; do sleep 0.1; done
    kill $!
    exit 0
fi
trap 'touch "$directory/done"; bash "$cluster" stop; rm -rf "$home" || true' EXIT
bash "$cluster" head
source "$(bash "$cluster" env)"
"$PYTHON" -m rlhf_megatron train "$@"
