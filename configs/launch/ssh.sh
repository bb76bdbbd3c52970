#!/bin/bash
# Plain hosts by ssh, one process a host (it drives all GPUs of the host). The checkout, its environment and the run
# directory are at the same path on all of them; from there:
#
#   configs/launch/ssh.sh "host0 host1" /shared/runs/my-run [section.key=value ...]
#
# Needs ssh without a password from here to each, and port 29500 (or PORT) of the first open to the others; the first
# name must resolve on all. What to expect: lines of each host begin with its number; process 0 prints the run's header,
# whose `mesh` row says how many devices and processes have joined, then the steps. Ctrl-C closes the connections, which
# ends all processes; the same command resumes the run from its last checkpoint.
set -eu
read -ra hosts <<< "$1"
run_dir=$2 # on storage that all hosts share
shift 2
token=${run_dir%/}.token # a secret of the job, by which its processes know each other
mkdir -p "$(dirname "$token")"
[ -s "$token" ] || (umask 077 && od -An -tx1 -N32 /dev/urandom | tr -d ' \n' > "$token")
quoted=$(printf ' %q' --token-file "$token" --config "${CONFIG:-configs/quickstart.yaml}" --run-dir "$run_dir" mesh.data=-1 "$@")
pids=()
for rank in "${!hosts[@]}"; do
    job="MASTER_ADDR=${hosts[0]} MASTER_PORT=${PORT:-29500} WORLD_SIZE=${#hosts[@]} RANK=$rank"
    # -tt: what runs over there ends when the connection does
    ssh -tt "${hosts[rank]}" "cd $(printf %q "$PWD") && env $job $(printf %q "$(type -P python)") scripts/train.py$quoted" \
        < /dev/null > >(sed -u "s/^/[$rank] /") 2>&1 &
    pids+=($!)
done
trap 'kill "${pids[@]}" 2> /dev/null || true' INT TERM
status=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2> /dev/null; do wait "$pid" || status=$?; done
done
exit "$status"
