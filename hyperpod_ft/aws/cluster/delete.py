"""Delete a cluster and what its stack need not keep; report what still costs money."""

from pathlib import Path

from hyperpod_ft.aws.cluster.access import ClusterAccess
from hyperpod_ft.aws.hyperpod import api
from hyperpod_ft.aws.ssh.config import SshFiles
from hyperpod_ft.aws.stack import stack
from hyperpod_ft.aws.stack.events import reporter
from hyperpod_ft.aws.stack.stack import Remaining
from hyperpod_ft.config.cluster_config import stack_name
from hyperpod_ft.errors import UserError


def delete(access: ClusterAccess, *, delete_data: bool, timeout: float) -> Remaining:
    """Delete the cluster, wait, then delete its stack or reduce it to the data. Returns what remains.

    `timeout`: in minutes. Raises UserError. Safe to run again.
    """
    if delete_data and access.config is not None and access.config.existing is not None:
        raise UserError(
            "--delete-data: the file system and the bucket are your own (`existing`)",
            "leave --delete-data out; delete them with the AWS CLI",
        )
    remaining = _delete(access, delete_data, timeout * 60)
    SshFiles(access.name, Path.home()).forget()
    return remaining


def _delete(access: ClusterAccess, delete_data: bool, timeout_seconds: float) -> Remaining:
    name = stack_name(access.name)
    with access.explained():
        watch = access.watch()
        while True:
            watch.until_gone(timeout_seconds)
            try:
                remaining = stack.delete(access.session, name, reporter(name, access.report), delete_data=delete_data)
            except UserError as error:
                if api.find(access.sagemaker, access.name) is None:
                    raise
                access.report(f"{error.problem}: a cluster {access.name} has been created meanwhile")
                continue
            if api.find(access.sagemaker, access.name) is None:
                return remaining
