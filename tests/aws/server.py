"""A stand-in for AWS: an HTTP server on the loopback interface that speaks the APIs which `hyperpod-ft cluster` calls.

    python -m tests.aws.server [--port N]     prints its URL once it answers, and ends when its stdin closes

What is moto's (PyPI, pinned): EC2, IAM, S3, STS, CloudWatch Logs, SSM documents, tags; the HTTP server itself.
What the modules beside this one add, because moto lacks it or differs from AWS:

    cluster*.py, nodes.py       SageMaker HyperPod: every cluster operation; states and nodes over time, lifecycle logs;
                                what is refused: buckets, missing scripts, roles, networks, Slurm groups, quotas;
                                extensions
    stack*.py, template.py,     CloudFormation: states, events, roll-back, retained resources, refused deletion
    *resource*.py
    endpoints.py, endpoint_*.py endpoints, inference components and their runtime: each starts the kit's own server
    prices.py                   AWS's Price List
    filesystems.py              FSx for Lustre: lifecycle, mount names
    quotas.py, account.py       Service Quotas of SageMaker; a managed policy, AWS's images; newer types in zones
    permissions.py              IAM's policy simulator
    role_access.py              what a role may do, by its policies and a bucket's
    training_plans.py           training plans of SageMaker
    training_job*.py,           SageMaker training jobs, which really run: a process tree in namespaces of its own for
    container*                  each host; states, interruptions, what is refused
    model_check.py, wire.py     requests checked against botocore's models (enums, patterns, lengths, ranges); errors

It is a stand-in: its answers follow AWS's models, documentation and users' reports; nothing here was recorded from
AWS. It starts no instances of clusters and runs no lifecycle scripts; it writes the log that a test gave it. It knows
no permissions but those of roles: any other credentials will do. A bug in it ends it, with its traceback. Tests steer
it through `/_test/...`, described in scenario.py.
"""

import argparse
import functools
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

import moto.backends
import moto.core.responses
import moto.s3.utils
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

# Their operations register themselves.
from tests.aws import (  # noqa: F401
    account,
    cluster_extensions,
    cluster_operations,
    endpoint_runtime,
    endpoints,
    filesystems,
    permissions,
    prices,
    quotas,
    role_access,
    stack_operations,
    training_job_operations,
    training_plans,
)
from tests.aws.scenario import Scenario
from tests.aws.wire import OPERATIONS, Answer, AwsError, Call
from tests.aws.world import World

_CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request")
_SERVICES = {"servicequotas": "service-quotas"}  # signing names that are not botocore's
_OWN = "testing-server"
_JSON = ("Content-Type", "application/json")
_MOTO_SERVICES = (
    *("ec2", "iam", "s3", "sts", "logs", "ssm", "sagemaker", "cloudwatch", "kms", "rds", "secretsmanager"),
    *("ecr", "events", "sns"),
)


class Server:
    """A WSGI application: the extension's operations and the side door itself, everything else goes to moto."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.RLock()
        self.world = World(endpoint)
        threading.Thread(target=self._tick, daemon=True).start()

    def close(self) -> None:
        """End what runs, and answer nothing more."""
        self._lock.acquire()
        self.world.close()

    def _tick(self) -> None:
        """Time advances between requests too, because moto answers some without the lock (logs, EC2)."""
        while True:
            with self._lock:
                clock = self.world.clock
                clock.started.clear()
                clock.advance()
                seconds = clock.seconds_until_due()
            clock.started.wait(seconds)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"].startswith("/_test/"):
            return _respond(self._side_door(environ), start_response)
        if found := role_access.credentials(self.world.regions, environ["PATH_INFO"]):
            return _respond((200, [_JSON], json.dumps(found).encode()), start_response)
        if endpoint_runtime.is_request(environ["PATH_INFO"]):
            return endpoint_runtime.respond(self.world, self._lock, environ, start_response)
        call = _call(environ)
        if call is None or call.access_key == _OWN:  # CloudFormation and HyperPod call other services
            return self._moto(environ, start_response)
        with self._lock:
            self.world.requests.append((call.service, call.operation))
            answer = self._injected(call) or self._denied(call, environ) or (self._own(call) if _is_own(call) else None)
        return self._moto(environ, start_response) if answer is None else _respond(answer, start_response)

    def _injected(self, call: Call) -> Answer | None:
        error = self.world.scenario.error_for(call.service, call.operation)
        if error is None:
            return None
        return call.refuse(AwsError(error.code, error.message or error.code, error.status))

    def _denied(self, call: Call, environ: dict[str, Any]) -> Answer | None:
        try:
            refused = role_access.refusal(self.world.region(call.region), call, environ, lambda: _body(environ))
        except AwsError as invalid:
            refused = invalid
        return refused and call.refuse(refused)

    def _own(self, call: Call) -> Answer:
        self.world.clock.advance()
        try:
            operation = OPERATIONS.get((call.service, call.operation))
            if operation is None:
                raise AwsError("UnknownOperationException", f"This stand-in has no {call.service} {call.operation}")
            return call.answer(operation(self.world.region(call.region), call.parameters()))
        except AwsError as error:
            return call.refuse(error)

    def _side_door(self, environ: dict[str, Any]) -> Answer:
        action = environ["PATH_INFO"].removeprefix("/_test/")
        with self._lock:
            if action == "reset":
                self.world.close()
                self.world = World(self._endpoint)
                for service in _MOTO_SERVICES:
                    moto.backends.get_backend(service).reset()  # type: ignore[arg-type]
                account.add_managed_policies()
            elif action == "begin":
                self.world.scenario = Scenario()
                self.world.requests.clear()
            elif action == "scenario":
                try:
                    self.world.scenario.merge(_body(environ))
                except ValueError as error:
                    return 400, [("Content-Type", "text/plain")], str(error).encode()
            elif action != "requests":
                return 404, [("Content-Type", "text/plain")], f"no {action}".encode()
            return 200, [_JSON], json.dumps(self.world.requests).encode()


def _is_own(call: Call) -> bool:
    """Whether the extension answers: all operations of services whose resources it keeps, single ones of others."""
    kept = ("cloudformation", "fsx", "service-quotas")
    return (
        call.service in kept
        or (call.service, call.operation) in OPERATIONS
        or (call.service == "sagemaker" and "Cluster" in call.operation)
    )


def _call(environ: dict[str, Any]) -> Call | None:
    """What a signed request asks for; None for an unsigned one, which only moto handles."""
    found = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    if not found:
        return None
    service, body = _SERVICES.get(found[3], found[3]), b""
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        body = _body(environ)
        operation = target.rpartition(".")[2]
    elif service == "s3":
        operation = environ["REQUEST_METHOD"]
    else:
        body = _body(environ)
        operation = parse_qs(body.decode(errors="replace")).get("Action", [""])[0]
    return Call(service, found[2], operation, body, found[1])


def _body(environ: dict[str, Any]) -> bytes:
    """The request's body, left in place for moto to read again."""
    body: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _respond(answer: Answer, start_response: Callable[..., Any]) -> list[bytes]:
    status, headers, body = answer
    start_response(f"{status} {'OK' if status < 400 else 'Error'}", [*headers, ("Content-Length", str(len(body)))])
    return [body]


class _Quiet(MotoRequestHandler):
    def log_request(self, *_: Any) -> None:
        pass


def _end_with_parent(server: Server) -> None:
    """stdin is a pipe whose other end only the parent holds: it closes when the parent ends, for whatever reason."""
    sys.stdin.buffer.read()
    try:
        server.close()
    finally:
        os._exit(0)


def _end_with_a_thread(failed: threading.ExceptHookArgs) -> None:
    """A bug in the stand-in: what uses it must fail at once, not wait for a state that never comes."""
    if issubclass(failed.exc_type, ConnectionError) and failed.thread and "request" in failed.thread.name:
        return  # a client that has ended
    threading.__excepthook__(failed)
    sys.stderr.flush()
    os._exit(1)


def _remember_what_moto_looks_up() -> None:
    """At each request it lists its directory, tries patterns, and lists the methods of a service's class."""
    dispatcher = DomainDispatcherApplication
    dispatcher.get_backend_for_host = functools.cache(dispatcher.get_backend_for_host)  # type: ignore[method-assign]
    moto.core.responses.method_names_from_class = functools.cache(moto.core.responses.method_names_from_class)


def _list_keys_as_they_were() -> None:
    """It lists a copy of a bucket's keys, but looks each up in the bucket: another request may have deleted it."""
    store: Any = moto.s3.utils._VersionedKeyStore
    store.items = store.iteritems = lambda keys: ((key, versions[-1]) for key, versions in dict(keys).items())
    store.values = store.itervalues = lambda keys: (versions[-1] for versions in dict(keys).values())
    store.lists = store.iterlists = lambda keys: iter(dict(keys).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    port = parser.parse_args().port
    os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # over a thousand at each reset; no test has instances of EC2
    _remember_what_moto_looks_up()
    _list_keys_as_they_were()
    account.offer_newer_types()
    account.add_managed_policies()
    threading.excepthook = _end_with_a_thread
    server = make_server(
        "127.0.0.1", port, app=lambda *_: [], threaded=True, request_handler=_Quiet, passthrough_errors=True
    )
    endpoint = f"http://127.0.0.1:{server.server_port}"
    server.app = application = Server(endpoint)
    threading.Thread(target=_end_with_parent, args=[application], daemon=True).start()
    print(endpoint, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
