"""AWS's regions, as listed by botocore without client or credentials, and the prefixes of their zone ids."""

import functools
import re

from hyperpod_ft.aws.validation.service_model import model

# `us-west-2`, `ap-southeast-1`, `us-gov-east-1`; the isolated and sovereign partitions use other forms
_REGION = re.compile(r"([a-z]{2})(-gov)?-((?:north|south)?(?:east|west)?|central)-(\d)")


@functools.cache
def known(service: str) -> dict[str, str]:
    """Every region of every partition in which AWS offers a service: region -> partition (`aws`, `aws-cn`, ...)."""
    from botocore.loaders import Loader  # noqa: PLC0415 - only here
    from botocore.regions import EndpointResolver  # noqa: PLC0415

    resolver = EndpointResolver(Loader().load_data("endpoints"))
    prefix = model(service).endpoint_prefix  # for example api.sagemaker
    return {
        region: partition
        for partition in resolver.get_available_partitions()
        for region in resolver.get_available_endpoints(prefix, partition)
    }


def zone_prefix(region: str) -> str | None:
    """The prefix of the ids of a region's availability zones: usw2 for us-west-2, usgw1 for us-gov-west-1.

    It is the area, `g` for GovCloud, the initials of the direction, and the number, for every region whose zones AWS
    documents ("Regions and Zones"). None for a region name of another form.
    """
    found = _REGION.fullmatch(region)
    if not found or not found[3]:
        return None
    area, government, direction, number = found.groups()
    initials = "".join(word[0] for word in re.findall("north|south|east|west|central", direction))
    return f"{area}{'g' if government else ''}{initials}{number}"


def dns_suffix(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
