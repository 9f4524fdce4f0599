#!/usr/bin/env bash
# Train under torchrun, on one machine or several:
#
#   launch/torchrun.sh configs/x.yaml key=value ...                    one machine
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/torchrun.sh x.yaml         on each of two machines, NODE_RANK 0 and 1
#
# The settings say how many machines and ranks there are (trainer.nnodes, trainer.n_gpus_per_node), whatever devices a
# machine has. `rlhf-megatron plan placement x.yaml` prints what stands on which machine.
#
# JOB             command (train): sft or reward-model as the configuration's job; doctor with --cluster looks at the nodes
# NODE_RANK       number of this machine, from 0 on (0); the controller runs on 0. Each machine starts its engines, and
#                 the run says which. From trainer.nnodes on a machine has engines alone: rollout.engine_machines names it
# MASTER_ADDR     address of machine 0 on a private network, as the others reach it; only there does the controller listen.
#                 With MAX_RESTARTS several, separated by commas: machine 0 has one, and a spare that is started with NODE_RANK=0
#                 after machine 0 was lost has another
# MASTER_PORT     free port of machine 0 for torch's rendezvous (29500); not used on one machine
# PYTHON          interpreter (python)
# RLHF_MEGATRON_SECRET_FILE   file with at least 32 random characters, mode 0600, the same on all machines: the secret of
#                 the control channel. Without it the secret is drawn for the run and passed through torch's rendezvous.
#
# MAX_RESTARTS    starts of the run after a crash (0). Each goes on from the newest checkpoint and the journal, which needs
#                 trainer.save_freq. Two attempts in a row without progress are enough; a run that was stopped, has ended
#                 with non-finite numbers or has a wrong configuration (exit codes 75, 17, 2) is not started again. On
#                 several machines all must see the run directory
# RLHF_MEGATRON_STOP_LIMIT_S   seconds after a signal until ranks that are left are killed (1800): well above
#                 trainer.stop_grace_s, within which the run stops by itself. A second signal ends it at once
#
# GLOO_SOCKET_IFNAME   network interface of gloo (the loopback on one machine, on several the one that leads to MASTER_ADDR)
#
# In place of what the settings say, and for JOB=doctor:
#
# NNODES          machines with ranks (trainer.nnodes; doctor: 1)
# NPROC_PER_NODE  ranks on each of them (trainer.n_gpus_per_node; doctor: the GPUs of this machine, or 1). A critic with a
#                 pool of its own has the last critic.num_ranks of all, counted through the machines
# ENGINE_NODES    machines with engines alone (as rollout.engine_machines says); machine 0 listens to them also where it
#                 is the only one with ranks
# STARTED_NODES   machines on which this script was started: a run that needs more or fewer is refused (not checked).
#                 launch/slurm.sbatch sets it
#
# Exits with the run's exit code, on every machine. launch/slurm.sbatch starts this on the nodes of a Slurm job.
set -euo pipefail

if [[ $# -lt 1 || ($1 == -* && ${JOB:-train} != doctor) ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
PYTHON=${PYTHON:-python}
NODE_RANK=${NODE_RANK:-0}
nodes=1 ranks=1 alone=0
if [[ ${JOB:-train} == doctor ]]; then
    ranks=${NPROC_PER_NODE:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 1)')}
elif [[ -z ${NNODES:-} || -z ${NPROC_PER_NODE:-} ]]; then
    # A configuration that cannot be read: the run says what is wrong with it, for which one rank will do.
    size=$("$PYTHON" -m rlhf_megatron.cli.launch_size "${JOB:-train}" "$@" 2>/dev/null) || size=""
    [[ -z $size ]] || read -r nodes ranks alone <<<"$size"
    machines=$((nodes + alone))
    if [[ -n $size && ${STARTED_NODES:-$machines} != "$machines" ]]; then
        ((NODE_RANK > 0)) || echo "This script was started on $STARTED_NODES machine(s), but the run needs $machines: $nodes with" \
            "ranks (trainer.nnodes) and $alone with engines alone (rollout.engine_machines); start it on $machines" \
            "(sbatch --nodes=$machines), or change the settings." >&2
        exit 2
    fi
fi
NNODES=${NNODES:-$nodes} NPROC_PER_NODE=${NPROC_PER_NODE:-$ranks} ENGINE_NODES=${ENGINE_NODES:-$alone}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > NPROC_PER_NODE ? $(nproc) / NPROC_PER_NODE : 1))}

supervisor=()
if ((${MAX_RESTARTS:-0} > 0)) && [[ ${JOB:-train} != doctor ]]; then
    supervisor=("$PYTHON" -m rlhf_megatron.cli.restarts "$MAX_RESTARTS")
elif [[ ${MASTER_ADDR:-} == *,* ]]; then
    echo "MASTER_ADDR ($MASTER_ADDR) may name several addresses only with MAX_RESTARTS; name one." >&2
    exit 2
fi

if ((NODE_RANK >= NNODES)); then
    : "${MASTER_ADDR:?set MASTER_ADDR to the address of the machine with NODE_RANK 0}"
    export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500} RLHF_MEGATRON_KEEPER=$NODE_RANK
    exec ${supervisor[@]+"${supervisor[@]}"} "$PYTHON" -m rlhf_megatron "${JOB:-train}" "$@"
elif ((NNODES == 1 && ENGINE_NODES == 0)); then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
    rendezvous=(--standalone --local-addr 127.0.0.1)
else
    : "${MASTER_ADDR:?set MASTER_ADDR to the address of the machine with NODE_RANK 0}"
    export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
    rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
fi
# rlhf_megatron.runtime.torchrun.agent is torch.distributed.run with the run's own exit code and without its log lines.
exec ${supervisor[@]+"${supervisor[@]}"} "$PYTHON" -m rlhf_megatron.runtime.torchrun.agent "${rendezvous[@]}" --nproc-per-node "$NPROC_PER_NODE" \
    -m rlhf_megatron "${JOB:-train}" "$@"
