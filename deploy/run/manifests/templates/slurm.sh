#!/bin/bash
# Runs a scenario on the nodes of a Slurm job: sbatch slurm.sh. Nodes need nonet in the same environment, and a shared folder.
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@cpus@
@options@#SBATCH --exclusive
#SBATCH --signal=B:TERM@@notice_s@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$PWD}"
export NONET_RUNS="${NONET_RUNS:-$PWD/runs}"
# Ray's ports answer only processes with this token, which the steps of the job inherit.
RAY_AUTH_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(32))')"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
run="$NONET_RUNS/@name@-$SLURM_JOB_ID"  # the same after a requeue
@trust@
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + 2 * (SLURM_JOB_ID % 5000)))
address="$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname -I | awk '{print $1}')"

# Ray ends with the job: Slurm ends the steps of a job whose script has ended.
srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
  ray start --head --node-ip-address="$address" --port="$port" --dashboard-port=$((port + 1))   --num-cpus="$SLURM_CPUS_PER_TASK"@ray_options@ --disable-usage-stats --block &
if [ "${#nodes[@]}" -gt 1 ]; then
  sleep 10
  srun --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --exclude="${nodes[0]}" \
    ray start --address="$address:$port" --num-cpus="$SLURM_CPUS_PER_TASK"@ray_options@ --disable-usage-stats --block &
fi
export RAY_ADDRESS="$address:$port"
python - "${#nodes[@]}" <<'PYTHON'
import sys
import time

import ray

deadline = time.monotonic() + 300
while True:
    try:
        ray.init(log_to_driver=False, logging_level="error")
        if sum(node["Alive"] for node in ray.nodes()) >= int(sys.argv[1]):
            break
        ray.shutdown()
    except (ConnectionError, RuntimeError, ValueError):
        pass
    if time.monotonic() > deadline:
        sys.exit("Ray has not started on all nodes within 300 s")
    time.sleep(2)
PYTHON

if compgen -G "$run/checkpoints/step-*" > /dev/null; then
  nonet resume "$run" &
else
  nonet run @scenario@@changes@ --run-dir "$run" &
fi
driver=$!
requeues=""
trap 'requeues=yes; kill -TERM "$driver"' TERM  # nonet writes a checkpoint and ends
code=0
wait "$driver" || code=$?
if [ -n "$requeues" ]; then
  wait "$driver" || code=$?
  [ -e "$run/report.json" ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
