"""What an instance of an endpoint costs."""

import json
from collections.abc import Iterable
from typing import Any

from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.errors import UserError

_REGION = "us-east-1"  # one of the few in which the Price List API is offered


def price_per_hour(session: Session, instance_type: str, region: str) -> float | None:
    """US dollars for an hour of one instance of an endpoint, on demand, without discounts, taxes, storage and transfer.

    None when AWS's Price List gives none.
    """
    filters = {"regionCode": region, "instanceName": f"ml.{instance_type}"}
    try:
        with explained("price"):
            pages = (
                Session(_REGION, session.profile)
                .client("pricing")
                .get_paginator("get_products")
                .paginate(
                    ServiceCode="AmazonSageMaker",
                    Filters=[{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in filters.items()],
                )
            )
            return hosting_price(json.loads(text) for page in pages for text in page["PriceList"])
    except UserError:
        return None  # without permission or network, the commands say that the price is unknown


def hosting_price(products: Iterable[dict[str, Any]]) -> float | None:
    """The hourly price among an instance type's products: training, notebooks and hosting have one each."""
    for product in products:
        attributes = product["product"]["attributes"]
        names = (attributes.get("component", ""), attributes.get("platoinstancetype", ""))
        if "Hosting" not in names and "-Host:" not in attributes.get("usagetype", ""):
            continue
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                price = float(dimension["pricePerUnit"].get("USD", 0))
                if price > 0:
                    return price
    return None
