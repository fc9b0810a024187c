"""A Slurm batch script that starts Ray on the nodes of a job, runs a scenario and continues it after a requeue."""

from __future__ import annotations

import shlex

from nonet.controller.setup import describe_code
from nonet.deploy.run.manifests.request import ManifestRequest
from nonet.errors import ConfigError

_NOTICE_S = 300  # how long before its time limit Slurm signals the job, which then writes a checkpoint

_SCRIPT = """\
#!/bin/bash
# Runs a scenario on the nodes of a Slurm job: sbatch slurm.sh. Nodes need nonet in the same environment, and a shared folder.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{options}#SBATCH --exclusive
#SBATCH --signal=B:TERM@{notice_s}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-$PWD}}"
export NONET_RUNS="${{NONET_RUNS:-$PWD/runs}}"
# Ray's ports answer only processes with this token, which the steps of the job inherit.
RAY_AUTH_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(32))')"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
run="$NONET_RUNS/{name}-$SLURM_JOB_ID"  # the same after a requeue
{trust}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + 2 * (SLURM_JOB_ID % 5000)))
address="$(srun --nodes=1 --ntasks=1 --nodelist="${{nodes[0]}}" hostname -I | awk '{{print $1}}')"

# Ray ends with the job: Slurm ends the steps of a job whose script has ended.
srun --nodes=1 --ntasks=1 --nodelist="${{nodes[0]}}" \\
  ray start --head --node-ip-address="$address" --port="$port" --dashboard-port=$((port + 1)) \
  --num-cpus="$SLURM_CPUS_PER_TASK"{ray_options} --disable-usage-stats --block &
if [ "${{#nodes[@]}}" -gt 1 ]; then
  sleep 10
  srun --nodes=$((${{#nodes[@]}} - 1)) --ntasks=$((${{#nodes[@]}} - 1)) --exclude="${{nodes[0]}}" \\
    ray start --address="$address:$port" --num-cpus="$SLURM_CPUS_PER_TASK"{ray_options} --disable-usage-stats --block &
fi
export RAY_ADDRESS="$address:$port"
python - "${{#nodes[@]}}" <<'PYTHON'
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
  nonet run {scenario}{changes} --run-dir "$run" &
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
"""


def build_slurm_files(request: ManifestRequest) -> dict[str, str]:
    """Build slurm.sh.

    Raises:
        ConfigError: The scenario has pools of several kinds of devices, or keeps its run in object storage.
    """
    group = request.find_accelerator()
    if request.is_stored:
        raise ConfigError(
            "--form slurm: the scenario has storage, and the script keeps the run in a shared folder; add --set storage=null, "
            "or use --form kuberay"
        )
    options, ray_options = "", ""
    if group is not None:
        is_gpu = group.device.resource == "GPU"
        options = f"#SBATCH --{'gpus-per-node=' if is_gpu else f'gres={group.device.name}:'}{group.devices}\n"
        resources = f" --resources='{{\"{group.device.resource}\": {group.devices}}}'"
        ray_options = f" --num-gpus={group.devices}" if is_gpu else resources
        if group.labels:
            ray_options += f" --labels={','.join(f'{name}={value}' for name, value in group.labels.items())}"
    if request.queue:
        options += f"#SBATCH --partition={request.queue}\n"
    nodes = group.most if group else max(group.most for group in request.groups)
    cpus = group.cpus if group else max(group.cpus for group in request.groups)
    script = _SCRIPT.format(
        name=request.name,
        nodes=nodes,
        cpus=cpus,
        options=options,
        ray_options=ray_options,
        trust=_format_approval(request),
        notice_s=_NOTICE_S,
        scenario=shlex.quote(str(request.path.absolute())),
        changes="".join(f" --set {shlex.quote(change)}" for change in request.changes),
    )
    return {"slurm.sh": script}


def _format_approval(request: ManifestRequest) -> str:
    """Return the lines of the script that approve the present code of the run; "" if the scenario names no code."""
    code_hash = describe_code(request.scenario, request.path.parent).hash
    if not code_hash:
        return ""
    return (
        "# What the run has now. If files that the scenario names change, write this script again.\n"
        f'export NONET_TRUST="{code_hash}${{NONET_TRUST:+,$NONET_TRUST}}"\n'
    )
