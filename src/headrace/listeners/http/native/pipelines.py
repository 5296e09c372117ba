"""Pipelines over HTTP: they report here, and people look here and ask them to stop."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.sinks.pipeline_reports import Report
from headrace.errors import MalformedJson
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import Query, path_name, read_json


async def list_pipelines(site: HttpContext, request: Request) -> Response:
    Query(request)
    pipelines = site.broker.pipelines
    return json_answer({"pipelines": [describe(site, name, pipelines.get(name)) for name in pipelines.names()]})


async def get_pipeline(site: HttpContext, request: Request) -> Response:
    Query(request)
    name = path_name(request, "pipeline")
    return json_answer(describe(site, name, site.broker.pipelines.get(name)))


async def put_pipeline(site: HttpContext, request: Request) -> Response:
    """The whole truth about a pipeline, said by itself; the answer says whether it was asked to stop."""
    Query(request)
    name = path_name(request, "pipeline")
    fields = await read_json(request, request.state.share)
    if fields.keys() != {"state", "details"}:
        raise MalformedJson('a report is {"state": "running", "details": {...}}')
    state, details = fields["state"], fields["details"]
    if type(state) is not str or type(details) is not dict:
        raise MalformedJson("state is a string and details an object")
    return json_answer(describe(site, name, site.broker.pipelines.report(name, state, details)))


async def stop_pipeline(site: HttpContext, request: Request) -> Response:
    """The pipeline learns of it with its next report and stops after its batch."""
    Query(request)
    name = path_name(request, "pipeline")
    return json_answer(describe(site, name, site.broker.pipelines.ask_to_stop(name)))


async def delete_pipeline(site: HttpContext, request: Request) -> Response:
    Query(request)
    site.broker.pipelines.forget(path_name(request, "pipeline"))
    return Response(status_code=204)


def describe(site: HttpContext, name: str, report: Report) -> dict[str, Any]:
    return {
        "name": name,
        "state": report.as_seen(site.broker.clock.now_ms()),
        "started": report.started_ms,
        "updated": report.updated_ms,
        "stop_requested": report.stop_requested,
        "details": report.details,
    }
