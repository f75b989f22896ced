"""A local cluster: a real Slurm (slurmctld, several slurmd, munged) on this machine, for rehearsals and tests.

>>> from pathlib import Path
>>> cluster = LocalCluster(Path("demo"))
>>> cluster.up(nodes=2)  # doctest: +SKIP
True
"""

from hyperpod_ft.localcluster.cluster import ClusterStatus, LocalCluster, NodeState, default_directory
from hyperpod_ft.localcluster.runtime import name_of, running_conf

__all__ = ["ClusterStatus", "LocalCluster", "NodeState", "default_directory", "name_of", "running_conf"]
