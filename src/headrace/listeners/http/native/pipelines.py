"""Pipelines: they report their state here, and users look at it and ask them to stop."""

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.sinks.pipeline_reports import StoredReport
from headrace.listeners.http.native.types import Pipeline, PipelineReport, Pipelines
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.requests import Query, decode, path_name, read_json


async def list_pipelines(context: HttpContext, request: Request) -> Response:
    Query(request)
    reports = context.broker.pipelines
    pipelines: Pipelines = {"pipelines": [describe(context, name, reports.get(name)) for name in reports.names()]}
    return json_response(pipelines)


async def get_pipeline(context: HttpContext, request: Request) -> Response:
    Query(request)
    name = path_name(request, "pipeline")
    return json_response(describe(context, name, context.broker.pipelines.get(name)))


async def put_pipeline(context: HttpContext, request: Request) -> Response:
    """Replaces the pipeline's report; the response says whether a user has asked it to stop."""
    Query(request)
    name = path_name(request, "pipeline")
    report = decode(await read_json(request, request.state.share), PipelineReport)
    return json_response(describe(context, name, context.broker.pipelines.report(name, report.state, report.details)))


async def stop_pipeline(context: HttpContext, request: Request) -> Response:
    """Asks the pipeline to stop: it sees the request in the response to its next report and finishes its batch."""
    Query(request)
    name = path_name(request, "pipeline")
    return json_response(describe(context, name, context.broker.pipelines.ask_to_stop(name)))


async def delete_pipeline(context: HttpContext, request: Request) -> Response:
    Query(request)
    context.broker.pipelines.forget(path_name(request, "pipeline"))
    return Response(status_code=204)


def describe(context: HttpContext, name: str, report: StoredReport) -> Pipeline:
    return {
        "name": name,
        "state": report.as_seen(context.broker.clock.now_ms()),
        "started": report.started_ms,
        "updated": report.updated_ms,
        "stop_requested": report.stop_requested,
        "details": report.details,
    }
