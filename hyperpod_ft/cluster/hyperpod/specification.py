"""An existing instance group as `UpdateCluster` takes it (pure).

`UpdateCluster` replaces a group's settings: a field that is left out gets its default, so that automatic patching might
end and new nodes get another image. So each change begins with everything that the group has.
"""

from typing import Any

# with the same name and form in ClusterInstanceGroupDetails and ClusterInstanceGroupSpecification
_SHARED = (
    "InstanceGroupName",
    "InstanceType",
    "LifeCycleConfig",
    "ExecutionRole",
    "ThreadsPerCore",
    "InstanceStorageConfigs",
    "OnStartDeepHealthChecks",
    "TrainingPlanArn",
    "OverrideVpcConfig",
    "ScheduledUpdateConfig",
    "SlurmConfig",
    "CapacityRequirements",
    "NetworkInterface",
)


def group_specification(described: dict[str, Any]) -> dict[str, Any]:
    """An instance group of `DescribeCluster`'s answer in the form that `UpdateCluster` takes, unchanged.

    All but KubernetesConfig, which groups of Slurm clusters do not have.
    """
    specification = {key: described[key] for key in _SHARED if described.get(key)}
    specification["InstanceCount"] = described["TargetCount"]
    if described.get("MinCount"):
        specification["MinInstanceCount"] = described["MinCount"]
    if flexible := described.get("InstanceRequirements"):
        specification.pop("InstanceType", None)  # the two exclude each other
        types = flexible.get("DesiredInstanceTypes") or flexible["CurrentInstanceTypes"]
        specification["InstanceRequirements"] = {"InstanceTypes": types}
    if patching := described.get("AutoPatchConfig"):
        specification["AutoPatchConfig"] = _auto_patch(patching)
    # an image of HyperPod's has a version; a custom one only an id
    for image in ("ImageReleaseVersion", "ImageId"):
        if value := described.get(f"Desired{image}") or described.get(f"Current{image}"):
            specification[image] = value
            break
    return specification


def _auto_patch(described: dict[str, Any]) -> dict[str, Any]:
    """`ClusterAutoPatchConfigDetails` as `ClusterAutoPatchConfig`.

    A date is repeated only if somebody asked for it and it is not yet set: HyperPod sets the others itself.
    """
    config = dict(described)
    current, desired = (config.pop(f"{which}PatchSchedule", None) for which in ("Current", "Desired"))
    if desired and desired != current:
        config["PatchSchedule"] = desired
    return config
