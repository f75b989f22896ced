"""AWS's regions as botocore lists them, without client or credentials, and how the ids of their zones begin."""

import functools
import re

from hyperpod_ft.aws.validation.service_model import model

# `us-west-2`, `ap-southeast-1`, `us-gov-east-1`; the isolated and the sovereign partitions name theirs otherwise
_REGION = re.compile(r"([a-z]{2})(-gov)?-((?:north|south)?(?:east|west)?|central)-(\d)")


@functools.cache
def known(service: str) -> dict[str, str]:
    """Every region of every partition in which AWS offers a service: region -> partition (`aws`, `aws-cn`, ...)."""
    from botocore.loaders import Loader  # noqa: PLC0415 - only here
    from botocore.regions import EndpointResolver  # noqa: PLC0415

    resolver = EndpointResolver(Loader().load_data("endpoints"))
    prefix = model(service).endpoint_prefix  # api.sagemaker, say
    return {
        region: partition
        for partition in resolver.get_available_partitions()
        for region in resolver.get_available_endpoints(prefix, partition)
    }


def zone_prefix(region: str) -> str | None:
    """How the ids of a region's availability zones begin: usw2 for us-west-2, usgw1 for us-gov-west-1.

    The area, `g` for GovCloud, the initials of the direction, the number: so for every region whose zones AWS
    documents ("Regions and Zones"). None where a region's name is of another form.
    """
    found = _REGION.fullmatch(region)
    if not found or not found[3]:
        return None
    area, government, direction, number = found.groups()
    initials = "".join(word[0] for word in re.findall("north|south|east|west|central", direction))
    return f"{area}{'g' if government else ''}{initials}{number}"


def dns_suffix(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
