#!/usr/bin/env bash
# Real launchers for tests/system/test_launchers.py, from Debian's packages: Open MPI, SLURM and munge. Needs root and apt-get.
# Nothing is started or configured for the machine: the tests start daemons of their own, in namespaces of their own.
# Exit status 0: all are there. 3: they cannot be installed here; the reason is printed.
set -u

packages=(openmpi-bin slurmctld slurmd slurm-client munge)
programs=(mpirun srun sbatch slurmctld slurmd munged)

PATH=$PATH:/usr/sbin:/sbin

missing() {
    for program in "${programs[@]}"; do
        command -v "$program" > /dev/null || echo "$program"
    done
}

absent=$(missing)
if [ -z "$absent" ]; then
    echo "launchers: all there: $(mpirun --version | head -n 1), $(slurmctld -V)"
    exit 0
fi
echo "launchers: missing: ${absent//$'\n'/, }"
if [ "$(id -u)" -ne 0 ]; then
    echo "launchers: NOT INSTALLED: this needs root (sudo tests/launchers/install.sh)"
    exit 3
fi
if ! command -v apt-get > /dev/null; then
    echo "launchers: NOT INSTALLED: there is no apt-get; install ${packages[*]} in this system's own way"
    exit 3
fi
export DEBIAN_FRONTEND=noninteractive
# No daemon of the machine is started by the packages.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
timeout 60 apt-get update -qq || echo "launchers: apt-get update failed; what is known is tried"
if ! timeout 120 apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null; then
    echo "launchers: NOT INSTALLED: apt-get install ${packages[*]} failed"
    exit 3
fi
absent=$(missing)
if [ -n "$absent" ]; then
    echo "launchers: NOT INSTALLED: still missing: ${absent//$'\n'/, }"
    exit 3
fi
echo "launchers: installed: $(mpirun --version | head -n 1), $(slurmctld -V)"
