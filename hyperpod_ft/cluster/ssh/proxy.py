"""ssh's ProxyCommand: find the node, then tunnel to its sshd.

    CLUSTER --group GROUP | --node INSTANCE --region REGION [--profile PROFILE]

A separate program, not a command of `hyperpod-ft`: ssh starts it with every connection. config.proxy_command has its
command line.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.cluster.hyperpod import api
from hyperpod_ft.cluster.hyperpod.api import list_nodes, ssm_target
from hyperpod_ft.cluster.ssh import ssm
from hyperpod_ft.cluster.ssh.config import SshFiles
from hyperpod_ft.cluster.ssh.connect import by_name, in_group
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="ssh_proxy", description=__doc__, allow_abbrev=False)
    parser.add_argument("cluster")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--group")
    which.add_argument("--node")
    parser.add_argument("--region", required=True)
    parser.add_argument("--profile")
    given = parser.parse_args()
    try:
        with explained(f"cluster {given.cluster}"):
            session = Session(given.region, given.profile)
            client = session.client("sagemaker")
            cluster, nodes = api.require(client, given.cluster), list_nodes(client, given.cluster)
        node = by_name(cluster, nodes, given.node) if given.node else in_group(cluster, nodes, given.group)
        if given.group:
            files = SshFiles(given.cluster, Path.home())
            files.lead_to(files.host(given.group), node.instance_id)
        ssm.tunnel(ssm.AwsCli(given.region, session.profile), ssm_target(cluster.id, node))
    except UserError as error:
        print(f"hyperpod-ft: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    sys.exit(0)
