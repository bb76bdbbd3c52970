#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine, for one command: tests/launchers/slurm.sh FOLDER COMMAND...
#
# munged, slurmctld and two slurmd (`slurmd -N node0`, `-N node1`) with a configuration of their own in FOLDER, in
# namespaces of their own (network: loopback only; processes: none outlives this script; mounts: an /etc/hosts in which
# the node names resolve, as they must on a real cluster). Needs root. Each node claims 16 CPUs and 8 GPUs, which are not
# there: SLURM only counts them.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
    exec unshare --mount --net --pid --uts --fork --kill-child --mount-proc "$0" --inside "$@"
fi
folder=$(realpath "$2")
shift 2
PATH=$PATH:/usr/sbin:/sbin
mkdir -p "$folder"/{control,munge,node0,node1}
chmod 700 "$folder/munge"

hostname machine
ip link set lo up
ip address add 10.99.0.1/32 dev lo # SLURM resolves names only where there is an address beside 127.0.0.1 (AI_ADDRCONFIG)
printf '127.0.0.1 localhost\n10.99.0.1 machine node0 node1\n' > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts

(umask 077 && head -c 1024 /dev/urandom > "$folder/munge/key")
munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge/pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"

cat > "$folder/slurm.conf" << END
ClusterName=tests
SlurmctldHost=machine(10.99.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ReturnToService=2
StateSaveLocation=$folder/control
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/control/pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/control.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node0 NodeHostname=machine NodeAddr=10.99.0.1 Port=7003 CPUs=16 Gres=gpu:8
NodeName=node1 NodeHostname=machine NodeAddr=10.99.0.1 Port=7004 CPUs=16 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
touch "$folder"/gpu{0..7}
echo "Name=gpu File=$folder/gpu[0-7]" > "$folder/gres.conf"
export SLURM_CONF=$folder/slurm.conf
slurmctld
slurmd -N node0
slurmd -N node1
for _ in $(seq 100); do
    nodes=$(timeout 2 sinfo -h -N -o %T 2> /dev/null | grep -c '^idle$' || true)
    if [ "$nodes" = 2 ]; then
        "$@" && exit 0 || exit $?
    fi
    sleep 0.1
done
echo "slurm.sh: the nodes did not come up" >&2
sinfo -N -o '%N %T %E' >&2 || true
tail -n 5 "$folder"/*.log >&2
exit 1
