from typing import Any

from hyperpod_ft.sagemaker.endpoint.operations import hosting_price


def product(price: str, **attributes: str) -> dict[str, Any]:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": price}}
    return {"product": {"attributes": attributes}, "terms": {"OnDemand": {"a": {"priceDimensions": {"b": dimension}}}}}


def test_the_price_is_that_of_hosting() -> None:
    training = product("1.0000000000", component="Training", usagetype="USW2-Train:ml.g6.xlarge")
    for hosting in (
        {"component": "Hosting"},
        {"platoinstancetype": "Hosting"},
        {"usagetype": "USW2-Host:ml.g6.xlarge"},
    ):
        assert hosting_price([training, product("1.4080000000", **hosting)]) == 1.408


def test_without_a_price_it_is_unknown() -> None:
    assert hosting_price([]) is None
    assert hosting_price([product("0.0000000000", component="Hosting")]) is None
    assert hosting_price([product("1.0", component="Training")]) is None
