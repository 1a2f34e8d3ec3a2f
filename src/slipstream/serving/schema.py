"""The OpenAPI description of a served model, with its columns."""

from __future__ import annotations

from typing import Any

from slipstream.serving.formats import ARROW, CSV, JSON
from slipstream.serving.formats.requests import COLUMNS, ROWS
from slipstream.serving.formats.responses import to_json
from slipstream.serving.limits import ServerLimits
from slipstream.serving.model import ServedModel

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
    """Return the description as JSON."""
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
    every = "Forecast from every row, not only from the end."
    resample = "Resample rows to the time step of the training data."
    parameters = [_parameter("resample", "query", flag, resample)]
    if model.signature.horizon:
        parameters.append(_parameter("every", "query", flag, every))
    return operation | {"parameters": parameters, "requestBody": _describe_body()}


def _describe_push(model: ServedModel) -> dict[str, Any]:
    text = "Append rows to a stream, which a first request creates, and predict them."
    statuses = (400, 401, 406, 408, 409, 413, 415, 422, 503)
    row = "How many rows the stream has to have before this request; another number is refused."
    parameters = [_parameter("row", "query", {"type": "integer", "minimum": 0}, row)]
    if model.signature.horizon:
        every = "Forecast from every row, not only from the last."
        parameters.append(_parameter("every", "query", {"type": "boolean"}, every))
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
