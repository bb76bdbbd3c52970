#!/bin/bash
# Open MPI, one process per host (it drives all GPUs of the host). From the checkout, with its environment active:
#
#   HOSTS=host0:1,host1:1 configs/launch/mpirun.sh 2 /shared/runs/my-run [section.key=value ...]
#
# or, without HOSTS, that many processes on this machine. Run it on the first host of the list: the coordinator is where
# mpirun runs. Tested with Open MPI 4.1. Open MPI 5 tells its processes no address: set MASTER_ADDR and MASTER_PORT
# with WORLD_SIZE and RANK instead, as in ssh.sh.
#
# What to expect: the run's header, whose `mesh` row says how many devices and processes have joined, then the steps. A
# process that fails ends the job: mpirun kills the others. It gives rank 0 a terminal, so that the progress bar is drawn
# into the log.
set -eu
processes=$1
run_dir=$2 # on storage that all hosts share
shift 2
# The processes know each other by this secret.
export JAXDIST_TOKEN=${JAXDIST_TOKEN:-$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')}
options=(-np "$processes" --bind-to none)
if [ -n "${HOSTS:-}" ]; then
    options+=(--host "$HOSTS" -x PATH -x JAXDIST_TOKEN) # add -x NAME for what the processes need, such as NCCL_SOCKET_IFNAME
else
    options+=(--oversubscribe)
fi
if [ "$(id -u)" -eq 0 ]; then # as in containers
    options+=(--allow-run-as-root)
fi
exec mpirun "${options[@]}" \
    python scripts/train.py --config "${CONFIG:-configs/quickstart.yaml}" --run-dir "$run_dir" mesh.data=-1 "$@"
