"""A cluster as files for the AWS CLI: the requests that `create` would send, without sending any.

    DIR/create.sh                       the commands, in order
        env_vars                        values that only the account has, read from the stack
        stack.yaml stack-parameters.json
        to-fill/cluster-config.json     the request of CreateCluster
        to-fill/lifecycle/...           the nodes' scripts; settings.json, provisioning_parameters.json (legacy)

Such values are `${NAME}` in to-fill/, with the names that AWS's create_config.sh uses; create.sh fills them in.
"""

import json
from pathlib import Path

from hyperpod_ft import __version__, publish
from hyperpod_ft.aws.hyperpod import lifecycle_files, requests
from hyperpod_ft.aws.stack import stack
from hyperpod_ft.aws.stack.cluster_resources import ClusterResources
from hyperpod_ft.aws.stack.stack import StackParameters
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import shell_templates

# environment variable: output of the stack
_OUTPUTS = {
    "VPC_ID": "VpcId",
    "SUBNET_ID": "PrivateSubnetId",
    "PUBLIC_SUBNET_ID": "PublicSubnetId",
    "SECURITY_GROUP": "SecurityGroupId",
    "ROLE": "RoleArn",
    "BUCKET": "Bucket",
    "FSX_ID": "FsxId",
    "FSX_DNS_NAME": "FsxDnsName",
    "FSX_MOUNTNAME": "FsxMountName",
}
_USED = ("SUBNET_ID", "SECURITY_GROUP", "ROLE", "BUCKET", "FSX_DNS_NAME", "FSX_MOUNTNAME")


def write(config: ClusterConfig, directory: Path) -> list[Path]:
    """Write the files and return their paths, sorted. Raises UserError for a directory that holds other files."""
    if directory.is_file() or (
        directory.is_dir() and any(directory.iterdir()) and not (directory / "create.sh").is_file()
    ):
        raise UserError(f"{directory}: holds other files", "name a new directory")
    publish.remove(directory / "to-fill")  # it may be from another cluster file
    for name, content in files(config).items():
        publish.write_text(directory / name, content, 0o777 if name.endswith(".sh") else 0o666)
    return sorted(directory / name for name in files(config))


def files(config: ClusterConfig) -> dict[str, str]:
    """The files by name relative to the directory."""
    base = _placeholders(config)
    content = lifecycle_files.files(config, base)
    folder = f"{lifecycle_files.PREFIX}/{config.name}/rendered"
    request = requests.create_cluster(config, base, f"s3://{base.bucket}/{folder}")
    template = {
        "version": __version__,
        "name": config.name,
        "region": config.region,
        "stack_name": config.stack_name,
        "existing": config.existing.model_dump() if config.existing else None,
        "instances": ",".join(dict.fromkeys(group.instance_type for group in config.workers)),
        "outputs": _OUTPUTS,
        "variables": _USED,
        "folder": folder,
        "tags": json.dumps([{"Key": key, "Value": value} for key, value in sorted(config.tags.items())]),
    }
    environment = shell_templates()
    found = {
        "create.sh": environment.get_template("cluster/create.sh.j2").render(template),
        "env_vars": environment.get_template("cluster/env_vars.j2").render(template),
        "to-fill/cluster-config.json": json.dumps(request, indent=2) + "\n",
        **{f"to-fill/lifecycle/{name}": data.decode() for name, data in content.items()},
    }
    if config.existing is None:
        parameters = [
            {"ParameterKey": key, "ParameterValue": value}
            for key, value in StackParameters.of(config).for_cloudformation().items()
        ]
        found["stack.yaml"] = stack.template()
        found["stack-parameters.json"] = json.dumps(parameters, indent=2) + "\n"
    return found


def _placeholders(config: ClusterConfig) -> ClusterResources:
    return ClusterResources(
        subnet_id="${SUBNET_ID}",
        security_group_ids=("${SECURITY_GROUP}", *(config.existing.security_group_ids[1:] if config.existing else ())),
        role_arn="${ROLE}",
        bucket="${BUCKET}",
        fsx_dns_name="${FSX_DNS_NAME}",
        fsx_mount_name="${FSX_MOUNTNAME}",
    )
