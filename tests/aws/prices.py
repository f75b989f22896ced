"""AWS's Price List, of SageMaker's instances: each type has a product for training too, at another price."""

import json
from typing import Any

from tests.aws.wire import operation
from tests.aws.world import Region


@operation("pricing", "GetProducts")
def get_products(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    filters = {one["Field"]: one["Value"] for one in request["Filters"]}
    name, price = filters["instanceName"], region.world.scenario.prices.get(filters["instanceName"])
    if request["ServiceCode"] != "AmazonSageMaker" or price is None:
        return {"FormatVersion": "aws_v1", "PriceList": []}
    return {
        "FormatVersion": "aws_v1",
        "PriceList": [
            json.dumps(_product(filters["regionCode"], name, component, amount))
            for component, amount in (("Training", price / 2), ("Hosting", price))
        ],
    }


def _product(region: str, name: str, component: str, price: float) -> dict[str, Any]:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price:.10f}"}}
    return {
        "product": {"attributes": {"regionCode": region, "instanceName": name, "component": component}},
        "terms": {"OnDemand": {"SKU.JRTCKXETXF": {"priceDimensions": {"SKU.JRTCKXETXF.6YS6EN2CT7": dimension}}}},
    }
