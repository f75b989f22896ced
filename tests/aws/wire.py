"""AWS's protocols, from botocore's models, for the operations that the extension answers itself.

The bytes are JSON 1.1 for SageMaker, FSx, Service Quotas and SSM; for CloudFormation and IAM they are Query, which
moto's parsers and serializers handle. An operation is a function from its parameters to its result, both in boto3's
form."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from moto.core.parse import PROTOCOL_PARSERS
from moto.core.serialize import get_serializer_class
from moto.core.utils import get_service_model

from tests.aws.model_check import violations

if TYPE_CHECKING:
    from tests.aws.world import Region

Answer = tuple[int, list[tuple[str, str]], bytes]
Operation = Callable[["Region", dict[str, Any]], dict[str, Any]]
_JSON = "application/x-amz-json-1.1"
OPERATIONS: dict[tuple[str, str], Operation] = {}


class AwsError(Exception):
    """An error answer of a service: a code, a message, an HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


def operation(service: str, name: str) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        OPERATIONS[service, name] = function
        return function

    return register


@dataclass(frozen=True)
class Call:
    """One request: the service, region and access key that its signature names, its operation, its body."""

    service: str
    region: str
    operation: str
    body: bytes
    access_key: str

    @property
    def _protocol(self) -> str:
        return "query" if self.service in ("cloudformation", "iam", "sts", "ec2") else "json"

    def parameters(self) -> dict[str, Any]:
        """Raises AwsError for a request that the service's model does not allow."""
        model = get_service_model(self.service).operation_model(self.operation)
        if self._protocol == "json":
            parameters: dict[str, Any] = json.loads(self.body or b"{}")
        else:
            values = dict(parse_qsl(self.body.decode(), keep_blank_values=True))
            parser = PROTOCOL_PARSERS["query"](model, map_type=dict)
            parameters = parser.parse(
                {"method": "POST", "values": values, "headers": {}, "body": b"", "url_path": "/", "url_params": {}}
            )
        if model.input_shape and (found := list(violations(parameters, model.input_shape))):
            many = f"{len(found)} validation error{'s' if len(found) > 1 else ''} detected: "
            code = "ValidationError" if self._protocol == "query" else "ValidationException"
            raise AwsError(code, many + "; ".join(found))
        return parameters

    def answer(self, result: dict[str, Any]) -> Answer:
        if self._protocol == "json":
            text = json.dumps(_without_none(result), default=datetime.timestamp)
            return 200, [("Content-Type", _JSON)], text.encode()
        service = get_service_model(self.service)
        model = service.operation_model(self.operation)
        serialized = get_serializer_class(self.service, service.metadata["protocol"])(operation_model=model)
        found = serialized.serialize(result)
        body = found["body"]
        return found["status_code"], list(found["headers"].items()), body if isinstance(body, bytes) else body.encode()

    def refuse(self, error: AwsError) -> Answer:
        if self.service == "s3":
            body = f"<Error><Code>{error.code}</Code><Message>{escape(error.message)}</Message></Error>"
            return error.status, [("Content-Type", "application/xml")], body.encode()
        if self.service == "ec2":
            body = (
                f"<Response><Errors><Error><Code>{error.code}</Code><Message>{escape(error.message)}</Message></Error>"
                "</Errors><RequestID>00000000-0000-4000-8000-000000000000</RequestID></Response>"
            )
            return error.status, [("Content-Type", "text/xml")], body.encode()
        if self._protocol == "query":
            body = (
                f"<ErrorResponse><Error><Type>Sender</Type><Code>{error.code}</Code>"
                f"<Message>{escape(error.message)}</Message></Error></ErrorResponse>"
            )
            return error.status, [("Content-Type", "text/xml")], body.encode()
        body = json.dumps({"__type": error.code, "message": error.message})
        return error.status, [("Content-Type", _JSON)], body.encode()


def _without_none(value: Any) -> Any:
    """A result without members that AWS would leave out."""
    if isinstance(value, dict):
        return {key: _without_none(member) for key, member in value.items() if member is not None}
    return [_without_none(member) for member in value] if isinstance(value, list | tuple) else value
