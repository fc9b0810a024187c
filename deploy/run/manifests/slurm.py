"""A Slurm batch script that starts Ray on the nodes of a job, runs a scenario and continues it after a requeue."""

from __future__ import annotations

import shlex

from nonet.controller.setup import describe_code
from nonet.deploy.run.manifests.request import ManifestRequest, fill_template
from nonet.errors import ConfigError

_NOTICE_S = 300  # how long before its time limit Slurm signals the job, which then writes a checkpoint


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
    script = fill_template(
        "slurm.sh",
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
