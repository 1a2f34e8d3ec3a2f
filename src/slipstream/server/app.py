"""The routes: predict, streams, health, metrics, schema."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pyarrow as pa
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.base.errors import UserError
from slipstream.base.text import escape_controls
from slipstream.server.bodies import (
    ARROW,
    COLUMNS,
    CSV,
    JSON,
    ROWS,
    RequestError,
    ServerLimits,
    check_content_type,
    choose_format,
    encode_table,
    parse_table,
    to_json,
)
from slipstream.server.guard import BODY, ROUTE, STRANGER, Guard, ServerMetrics
from slipstream.server.model import Answered, Arrays, Batcher, RequestWindows, ServedModel
from slipstream.server.streams import RowSteps, Streams, StreamState

NUMBER, TEXT = {"type": ["number", "null"]}, {"type": ["string", "number"]}
ERRORS = {
    400: "The body is not what its Content-Type says.",
    401: "The token is missing or wrong.",
    404: "There is no such stream.",
    406: "None of the formats in Accept can be written.",
    408: "The body did not arrive in time.",
    409: "The rows do not follow those that the stream has.",
    413: "The body, its rows or its columns are more than the limit.",
    415: "The Content-Type is none that can be read.",
    422: "The table is not one that the model can predict.",
    503: "The server is busy; the header Retry-After says when to try again.",
}


def make_schema(model: ServedModel, limits: ServerLimits, *, has_streams: bool) -> bytes:
    """Return the content of GET /schema: the inputs and outputs of the model."""
    from slipstream import __version__

    paths = {
        "/predict": {"post": _describe_predict(model)},
        "/streams/{id}": {
            "parameters": [_parameter("id", "path", {"type": "string"}, "A name of your choice.")],
            "post": _describe_push(model),
            "get": _operation("Show how far a stream is.", (404,), {JSON: _refer("Stream")}),
            "delete": {
                "summary": "Remove a stream.",
                "responses": {"204": {"description": "Removed."}, **_list_errors((401, 404))},
            },
        },
        "/health": {"get": _operation("Whether the server answers.", (), {JSON: _refer("Health")})},
        "/metrics": {"get": _operation("Counters for Prometheus.", (), {"text/plain": {}})},
        "/schema": {"get": _operation("This description.", (), {JSON: {}})},
    }
    if not has_streams:
        del paths["/streams/{id}"]
    text = (
        f"{model.description} of the run {model.name}. A window has {model.signature.context} "
        f"rows. A request has at most {limits.body_bytes:,} bytes and {limits.rows:,} rows."
    )
    return to_json(
        {
            "openapi": "3.1.0",
            "info": {"title": f"slipstream: {model.name}", "version": __version__}
            | {"description": text},
            "paths": paths,
            "components": {
                "schemas": _make_components(model),
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _describe_predict(model: ServedModel) -> dict[str, Any]:
    text = "Predict the rows after each series, or estimate every row."
    operation = _operation(text, (400, 401, 406, 408, 413, 415, 422, 503), _list_formats())
    flag = {"type": "boolean", "default": False}
    rows = "Forecast from every row, not only from the end."
    resample = "Resample rows to the time step of the training data."
    parameters = [_parameter("resample", "query", flag, resample)]
    if model.signature.horizon:
        parameters.append(_parameter("every", "query", flag, rows))
    return operation | {"parameters": parameters, "requestBody": _describe_body()}


def _describe_push(model: ServedModel) -> dict[str, Any]:
    text = "Append rows to a stream, which a first request creates, and predict them."
    statuses = (400, 401, 406, 408, 409, 413, 415, 422, 503)
    row = "How many rows the stream has to have before this request; another number is refused."
    parameters = [_parameter("row", "query", {"type": "integer", "minimum": 0}, row)]
    if model.signature.horizon:
        rows = "Forecast from every row, not only from the last."
        parameters.append(_parameter("every", "query", {"type": "boolean"}, rows))
    operation = _operation(text, statuses, _list_formats())
    return operation | {"parameters": parameters, "requestBody": _describe_body()}


def _make_components(model: ServedModel) -> dict[str, Any]:
    data, signature = model.config.data, model.signature
    texts = (*data.ids, *data.time_columns)
    columns: dict[str, Any] = dict.fromkeys(texts, TEXT)
    if not data.prepare:  # otherwise its steps make the inputs of other columns
        columns |= dict.fromkeys((*signature.inputs, *signature.static), NUMBER)
    row = {"type": "object", "properties": columns, "required": list(columns)}
    lists = {name: {"type": "array", "items": kind} for name, kind in columns.items()}
    table = {"type": "object", "properties": lists, "required": list(columns)}
    count = {"type": "integer"}
    stream = {"stream": {"type": "string"}, "rows": count, "missing_rows": count}
    predictions = {"type": "array", "items": {"type": "object"}}
    notes = {"type": "array", "items": {"type": "string"}}
    return {
        "Table": {
            "oneOf": [
                {"type": "object", "properties": {ROWS: {"type": "array", "items": row}}},
                {"type": "object", "properties": {COLUMNS: table}},
                {"type": "array", "items": row},
            ]
        },
        "Predictions": {
            "type": "object",
            "properties": {"predictions": predictions, "notes": notes, **stream},
            "required": ["predictions"],
        },
        "Stream": {"type": "object", "properties": stream},
        "Health": {"type": "object", "properties": {"status": {"const": "ok"}}},
        "Error": {"type": "object", "properties": {"error": {"type": "string"}}},
    }


def _describe_body() -> dict[str, Any]:
    return {"required": True, "content": {JSON: _refer("Table"), CSV: {}, ARROW: {}}}


def _list_formats() -> dict[str, Any]:
    return {JSON: _refer("Predictions"), CSV: {}, ARROW: {}}


def _operation(summary: str, errors: tuple[int, ...], content: dict[str, Any]) -> dict[str, Any]:
    answer = {"200": {"description": "The answer.", "content": content}}
    return {"summary": summary, "responses": answer | _list_errors(errors)}


def _list_errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    content = {JSON: _refer("Error")}
    return {str(status): {"description": ERRORS[status], "content": content} for status in statuses}


def _parameter(name: str, where: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    required = where == "path"
    return {"name": name, "in": where, "required": required, "schema": schema, "description": text}


def _refer(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


INLINE_BYTES = 1 << 15
"""Bodies up to this size are read by the event loop itself; a thread would take longer"""
FLAGS = {"true": True, "1": True, "": True, "false": False, "0": False}
EVERY, RESAMPLE, ROW = "every", "resample", "row"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Endpoint = Callable[[Request], Awaitable[Response]]


class PredictionServer:
    """A model with its queue and its streams."""

    def __init__(
        self,
        model: ServedModel,
        limits: ServerLimits,
        streams: Streams,
        *,
        has_streams: bool = True,
    ) -> None:
        self.model, self.limits, self.streams = model, limits, streams
        self.has_streams = has_streams
        """Whether clients can use streams; not where several processes share the requests"""
        self.metrics = ServerMetrics(
            {
                "streams": ("Streams whose state is in memory.", lambda: len(streams)),
                "queued_requests": (
                    "Requests that wait for the model.",
                    lambda: self.batcher.waiting,
                ),
            }
        )
        self.batcher = Batcher(model.run, self.metrics.count_batch)

    async def predict(self, request: Request) -> Response:
        """Predict the table in the body."""
        options = _read_query(request, (EVERY, RESAMPLE))
        kind, accepted = _read_formats(request)

        def read(body: bytes) -> RequestWindows:
            return self.model.read(parse_table(body, kind, self.limits), **options)

        with self.batcher.expect():
            windows = await _read_body(read, request)
        answered = windows.finish(await self._predict(windows))
        extra = {"model": self.model.description}
        return _encode(answered.table, windows.notes, accepted, extra)

    async def push(self, request: Request) -> Response:
        """Append rows to a stream and predict them; a request that fails leaves the stream
        unchanged."""
        if self.model.refusal:
            ahead = " that end with the rows to predict" if self.model.signature.future else ""
            text = (
                f"there are no streams here: {self.model.refusal}; send tables{ahead} to /predict"
            )
            raise RequestError(422, text)
        options = _read_query(request, (ROW, EVERY))
        formats = _read_formats(request)
        name, expected = request.path_params["id"], options.pop(ROW, None)
        append = self._append_windows if self.model.stream is None else self._append_rows
        async with self.streams.open(name, expected) as stream:
            answered, notes = await append(request, name, stream.state, formats[0], **options)
            extra = _describe(name, answered.state)
            answer = _encode(answered.table, notes, formats[1], extra)
            stream.state = answered.state
        return answer

    async def _append_windows(
        self, request: Request, name: str, state: StreamState, kind: str, every: bool = False
    ) -> tuple[Answered, tuple[str, ...]]:
        """Predict new rows from the windows that end with them."""

        def read(body: bytes) -> RequestWindows:
            return self.model.append(name, parse_table(body, kind, self.limits), state, every=every)

        with self.batcher.expect():
            windows = await _read_body(read, request)
        return windows.finish(await self._predict(windows)), windows.notes

    async def _append_rows(
        self, request: Request, name: str, state: StreamState, kind: str, every: bool = False
    ) -> tuple[Answered, tuple[str, ...]]:
        """Predict new rows one after the other, in the model's thread."""

        def read(body: bytes) -> RowSteps:
            return self.model.step(name, parse_table(body, kind, self.limits), state)

        steps = await _read_body(read, request)
        while not steps.is_done:
            await self.batcher.call(steps.advance)
        rows = steps.finish(self.model.signature)
        return self.model.finish_steps(name, rows, every), rows.notes

    async def show(self, request: Request) -> Response:
        """Return the number of rows that a stream has received."""
        name = request.path_params["id"]
        return _answer(to_json(_describe(name, self.streams.find(name).state)))

    async def remove(self, request: Request) -> Response:
        """Remove a stream."""
        await self.streams.remove(request.path_params["id"])
        return Response(status_code=204)

    async def show_health(self, request: Request) -> Response:
        """Report that the server is up; a client without the token learns nothing else."""
        known = {} if request.scope.get(STRANGER) else {"run": self.model.name}
        return _answer(to_json({"status": "ok", **known}))

    async def show_metrics(self, _: Request) -> Response:
        return _answer(self.metrics.format().encode(), METRICS_TYPE)

    async def show_schema(self, _: Request) -> Response:
        return _answer(make_schema(self.model, self.limits, has_streams=self.has_streams))

    async def _predict(self, windows: RequestWindows) -> Arrays:
        if not windows.num_windows:
            return self.model.make_empty()
        if windows.table_pass is not None:
            while not windows.table_pass.is_done:
                await self.batcher.call(windows.table_pass.advance)
            return {self.model.interface.output: windows.table_pass.finish()}
        return await self.batcher.predict(windows.num_windows, windows.gather)


def _describe(name: str, state: StreamState) -> dict[str, Any]:
    return {"stream": name, "rows": state.num_rows, "missing_rows": state.missing_rows}


def make_app(server: PredictionServer, token: str | None) -> Guard:
    """Return the application behind its checks."""
    routes = [
        _route("/predict", server.predict, "POST"),
        _route("/health", server.show_health, "GET"),
        _route("/metrics", server.show_metrics, "GET"),
        _route("/schema", server.show_schema, "GET"),
    ]
    if server.has_streams:
        routes += [
            _route("/streams/{id}", server.push, "POST"),
            _route("/streams/{id}", server.show, "GET"),
            _route("/streams/{id}", server.remove, "DELETE"),
        ]
    handlers: dict[Any, Any] = {
        RequestError: _refuse,
        UserError: _refuse_table,
        HTTPException: _refuse_route,
        Exception: _report_failure,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(app, limits=server.limits, token=token, metrics=server.metrics)


def _route(path: str, endpoint: Endpoint, method: str) -> Route:
    async def call(request: Request) -> Response:
        request.scope[ROUTE] = f"{method} {path}"
        return await endpoint(request)

    return Route(path, call, methods=[method])


async def _refuse(_: Request, error: RequestError) -> Response:
    return Response(to_json(error.content), error.status, error.headers, media_type=JSON)


async def _refuse_table(request: Request, error: UserError) -> Response:
    return await _refuse(request, RequestError(422, str(error)))


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    text = {404: "there is nothing at this path; GET /schema describes what there is"}
    text[405] = f"{request.method} is not for this path; GET /schema describes what is"
    headers = dict(error.headers or {})
    known = RequestError(error.status_code, text.get(error.status_code, error.detail), headers)
    return await _refuse(request, known)


async def _report_failure(request: Request, _: Exception) -> Response:
    text = "internal error; the server's log has its details"
    return await _refuse(request, RequestError(500, text))


def _read_formats(request: Request) -> tuple[str, str]:
    """Return the formats of the body and of the answer."""
    kind = check_content_type(request.headers.get("content-type", ""))
    return kind, choose_format(request.headers.get("accept", ""))


def _read_query(request: Request, known: tuple[str, ...]) -> dict[str, Any]:
    """Return the parameters of the query."""
    result: dict[str, Any] = {}
    for name, text in request.query_params.items():
        if name not in known:
            listed = ", ".join(known)
            raise RequestError(422, f'"{name[:100]}" is no parameter of this path; it has {listed}')
        if name == ROW:
            if not (text.isascii() and text.isdigit() and len(text) < 16):
                raise RequestError(422, f'row is "{text[:100]}"; it is a number from 0 on')
            result[name] = int(text)
        elif text.lower() in FLAGS:
            result[name] = FLAGS[text.lower()]
        else:
            raise RequestError(422, f'{name} is "{text[:100]}"; it is true or false')
    return result


async def _read_body(read: Callable[[bytes], Any], request: Request) -> Any:
    """Read a body: a small one here, once others that have arrived are announced; a large one in a
    thread, so that it does not hold up the others."""
    body = bytes(request.scope[BODY])
    if len(body) > INLINE_BYTES:
        return await asyncio.to_thread(read, body)
    await asyncio.sleep(0)
    return read(body)


def _encode(table: pa.Table, notes: Iterable[str], kind: str, extra: dict[str, Any]) -> Response:
    listed = [escape_controls(note) for note in notes]
    return _answer(encode_table(table, kind, extra | {"notes": listed}), kind)


def _answer(body: bytes, kind: str = JSON) -> Response:
    return Response(body, media_type=kind)
