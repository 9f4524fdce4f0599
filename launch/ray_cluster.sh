#!/usr/bin/env bash
# A Ray cluster for trainer.runtime=ray, on this machine or on several:
#
#   launch/ray_cluster.sh head                           on the first machine
#   launch/ray_cluster.sh worker 10.0.0.1                on each of the others, with the address of the first
#   launch/ray_cluster.sh stop                           on each: ends what this script has started there, nothing else
#   launch/ray_cluster.sh env                            on the first: the file that a driver there is to source
#   launch/ray_cluster.sh up 10.0.0.1 10.0.0.2 ...       all of it by ssh: head on the first, workers on the others
#   launch/ray_cluster.sh down 10.0.0.1 10.0.0.2 ...     stop on each by ssh
#
# Then, on the first machine: source "$(launch/ray_cluster.sh env)", and rlhf-megatron train x.yaml trainer.runtime=ray
#
# ADDRESS         address of this machine on a private network (head: 127.0.0.1, a cluster of this machine alone that
#                 nobody else reaches; worker: the one that leads to the head). Away from the loopback Ray's servers listen
#                 on ALL addresses of the machine, and who has the token runs code in the cluster: see docs/security.md
# PORTS           the first of 900 ports (6379, of the GCS): the next ones are Ray's servers, from PORTS + 100 on workers
# TOKEN_FILE      what all machines and drivers must have alike, mode 0600 (.ray/auth_token in the home directory); made
#                 where it is missing. `up` writes it to every machine
# DASHBOARD       1: the head's dashboard, on 127.0.0.1 at PORTS + 7, which job submission needs (0)
# NUM_CPUS, NUM_GPUS   what Ray is to count on this machine (what it finds)
# STATE_DIR       sockets, logs and process ids, mode 0700, a short path (rlhf-ray-UID where mktemp puts its files)
# FOREGROUND      1: stay until a signal comes, or a server of Ray ends (0); launch/slurm_ray.sbatch uses it
# RAY             the program ray (ray)
# SSH             of up and down (ssh -o BatchMode=yes)
set -euo pipefail

explain() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
}
fail() {
    echo "ray_cluster.sh: $*" >&2
    exit 2
}

verb=${1:-}
PORTS=${PORTS:-6379}
TOKEN_FILE=${TOKEN_FILE:-$HOME/.ray/auth_token}
STATE_DIR=${STATE_DIR:-$(dirname "$(mktemp -u)")/rlhf-ray-$(id -u)}
RAY=${RAY:-ray}
SSH=${SSH:-ssh -o BatchMode=yes}
state=$STATE_DIR/$PORTS

# Others may make directories beside it, too.
private_directory() {
    (umask 077 && mkdir -p "$1")
    [[ -O $1 && ! -L $1 && $(stat -c %a "$1") == 700 ]] || fail "$1 must be a directory of yours with mode 700; remove it, or set STATE_DIR."
}

check_token() {
    if [[ ! -e $TOKEN_FILE ]]; then
        [[ $1 == head ]] || fail "TOKEN_FILE ($TOKEN_FILE) is not there; copy it from the head's machine, mode 0600."
        (umask 077 && mkdir -p "$(dirname "$TOKEN_FILE")" && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$TOKEN_FILE")
    fi
    [[ $(stat -Lc %a "$TOKEN_FILE") == [46]00 ]] || fail "TOKEN_FILE ($TOKEN_FILE) can be read by others; chmod 600 it."
}

# What driver and servers need alike: rlhf_megatron/runtime/ray/ray_environment.py explains each.
variables() {
    echo "RAY_AUTH_MODE=token"
    echo "RAY_AUTH_TOKEN_PATH=$(realpath "$TOKEN_FILE")"
    echo "RAY_USAGE_STATS_ENABLED=0"
    echo "RAY_JOB_STOP_WAIT_TIME_S=120" # of ray job stop: the run saves its state (trainer.stop_grace_s) before SIGKILL
    echo "RAY_memory_monitor_refresh_ms=0"
    echo "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0"
    [[ $1 != 127.* ]] || echo "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" # Ray's only switch for a loopback address
}

say_ports() {
    local names=(GCS "node manager" "object manager" "runtime environments" "agent (gRPC)" "agent (HTTP)" metrics dashboard "Ray client")
    local address number
    command -v ss >/dev/null || { echo "  (ss is not here: ports $PORTS to $((PORTS + 899)))"; return; }
    while read -r _ _ _ address _; do
        number=$((${address##*:} - PORTS))
        echo "  $address  ${names[$number]:-worker}"
    done < <(ss -Hltn "sport >= :$PORTS and sport <= :$((PORTS + 99))" | sort -k4,4 -u)
    echo "  workers: ports $((PORTS + 100)) to $((PORTS + 899))"
}

# Workers are often started with the head.
await_head() {
    local n
    for ((n = 0; n < 1200; n++)); do
        (: <"/dev/tcp/${1%:*}/${1##*:}") 2>/dev/null && return
        sleep 0.1
    done
    fail "no head answers at $1 after 120 s; start it there, and see that its ports can be reached from here."
}

start() {
    local role=$1 address=$2 options=()
    if [[ -e $state.pid ]] && kill -0 "$(cat "$state.pid")" 2>/dev/null; then
        fail "one runs here at PORTS=$PORTS (process $(cat "$state.pid")); stop it, or choose other PORTS."
    fi
    private_directory "$STATE_DIR"
    check_token "$role"
    if [[ $role == head ]]; then
        options+=(--head --port "$PORTS" --dashboard-port $((PORTS + 7)) --dashboard-host 127.0.0.1)
        options+=(--ray-client-server-port $((PORTS + 8))) # there is no switch to leave it out
        if [[ ${DASHBOARD:-0} == 1 ]]; then options+=(--include-dashboard true); else options+=(--include-dashboard false); fi
        options+=(--temp-dir "$STATE_DIR/ray")
        { variables "$address" && echo "RAY_ADDRESS=$address:$PORTS"; } | sed 's/^/export /' >"$state.env"
    else
        await_head "$3"
        options+=(--address "$3")
    fi
    options+=(--node-ip-address "$address" --node-manager-port $((PORTS + 1)) --object-manager-port $((PORTS + 2)))
    options+=(--runtime-env-agent-port $((PORTS + 3)) --dashboard-agent-grpc-port $((PORTS + 4)))
    options+=(--dashboard-agent-listen-port $((PORTS + 5)) --metrics-export-port $((PORTS + 6)))
    options+=(--min-worker-port $((PORTS + 100)) --max-worker-port $((PORTS + 899)) --disable-usage-stats)
    [[ -z ${NUM_CPUS:-} ]] || options+=(--num-cpus "$NUM_CPUS")
    [[ -z ${NUM_GPUS:-} ]] || options+=(--num-gpus "$NUM_GPUS")
    local environment=()
    mapfile -t environment < <(variables "$address")
    if [[ ${FOREGROUND:-0} == 1 ]]; then
        exec env "${environment[@]}" "$RAY" start --block "${options[@]}"
    fi
    setsid env "${environment[@]}" "$RAY" start --block "${options[@]}" </dev/null >"$state.log" 2>&1 &
    local pid=$!
    echo "$pid" >"$state.pid"
    for ((n = 0; n < 1200; n++)); do
        grep -q "Ray runtime started" "$state.log" && break
        if ! kill -0 "$pid" 2>/dev/null; then
            tail -n 20 "$state.log" >&2
            rm -f "$state.pid"
            fail "ray start has failed; its output is above, and in $state.log."
        fi
        sleep 0.1
    done
    grep -q "Ray runtime started" "$state.log" || { stop; fail "ray start was not ready after 120 s; see $state.log."; }
    echo "Ray $role on $address (process $pid, log $state.log); it listens on"
    say_ports
    if [[ $role == head ]]; then
        echo "workers: ADDRESS=... TOKEN_FILE=... launch/ray_cluster.sh worker $address:$PORTS"
        echo "drivers, here: source $state.env; rlhf-megatron train RUN.yaml trainer.runtime=ray"
    fi
}

# The process of `ray start --block` ends all that it has started, and nothing else.
stop() {
    [[ -e $state.pid ]] || { echo "nothing runs here at PORTS=$PORTS"; return; }
    local pid
    pid=$(cat "$state.pid")
    if [[ $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) == *" start --block "* ]]; then
        kill -TERM "$pid"
        for ((n = 0; n < 450; n++)); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        if kill -0 "$pid" 2>/dev/null; then
            kill -KILL -- "-$pid" # its session: Ray's servers, which end their workers
        fi
    fi
    rm -f "$state.pid" "$state.env"
    echo "Ray at PORTS=$PORTS has ended here"
}

# The same on another machine, with these settings; options of this script stand in its environment.
remote() {
    local host=$1 words=() name
    shift
    for name in PORTS TOKEN_FILE STATE_DIR RAY NUM_CPUS NUM_GPUS DASHBOARD; do
        [[ -z ${!name:-} ]] || words+=("$name=${!name}")
    done
    # shellcheck disable=SC2029  # meant to be expanded here
    $SSH "$host" "cd $(printf %q "$PWD") && env ADDRESS=$(printf %q "$host") $(printf '%q ' "${words[@]}") bash $(printf %q "$0") $*"
}

give_token() {
    local folder file
    folder=$(printf %q "$(dirname "$TOKEN_FILE")") file=$(printf %q "$TOKEN_FILE")
    # By way of another file: where the directory is shared, that is the one that is read here.
    # shellcheck disable=SC2029,SC2094
    $SSH "$1" "umask 077 && mkdir -p $folder && cat >$file.new && mv $file.new $file" <"$TOKEN_FILE"
}

case $verb in
    head)
        start head "${ADDRESS:-127.0.0.1}"
        ;;
    worker)
        [[ $# -eq 2 ]] || explain
        head=$2
        [[ $head == *:* ]] || head=$head:$PORTS
        [[ $head != 127.* ]] || fail "a head on $head is a cluster of one machine; start it with ADDRESS=..., its address on a private network."
        ADDRESS=${ADDRESS:-$(ip -4 route get "${head%:*}" | sed -n 's/.* src \([0-9.]*\).*/\1/p')}
        start worker "${ADDRESS:?set ADDRESS to the address of this machine}" "$head"
        ;;
    stop)
        stop
        ;;
    env)
        [[ -e $state.env ]] || fail "no head runs here at PORTS=$PORTS ($state.env is not there); start one: launch/ray_cluster.sh head."
        echo "$state.env"
        ;;
    up)
        [[ $# -ge 2 ]] || explain
        shift
        check_token head
        for host in "$@"; do give_token "$host"; done
        first=$1
        remote "$first" head
        shift
        for host in "$@"; do remote "$host" worker "$first:$PORTS"; done
        ;;
    down)
        [[ $# -ge 2 ]] || explain
        shift
        code=0
        for host in "$@"; do remote "$host" stop || code=$?; done
        exit "$code"
        ;;
    *)
        explain
        ;;
esac
